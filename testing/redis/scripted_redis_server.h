#ifndef DDP_TESTING_REDIS_SCRIPTED_REDIS_SERVER_H_
#define DDP_TESTING_REDIS_SCRIPTED_REDIS_SERVER_H_

#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::testing {

// A server with fixed answers, such as a real Redis server never gives. Owns one thread.
class ScriptedRedisServer {
 public:
  // Answers on one connection: the first follows the first bytes that the client sends, and so on.
  // The server closes the connection after the last answer.
  using Answers = std::vector<std::string>;

  // Starts the server. It accepts one connection after the other.
  explicit ScriptedRedisServer(std::vector<Answers> connections);
  ~ScriptedRedisServer() { Finish(); }
  ScriptedRedisServer(const ScriptedRedisServer&) = delete;
  ScriptedRedisServer& operator=(const ScriptedRedisServer&) = delete;

  const store::RedisEndpoint& endpoint() const { return endpoint_; }

  // Accepts no more connections. Waits until the present client has closed or all its answers are
  // sent, then ends the server. Returns the bytes that clients sent, one entry per answer.
  std::vector<std::string> Finish();

 private:
  void Serve();

  const std::vector<Answers> connections_;
  char folder_[32] = "/tmp/ddp-test-XXXXXX";
  store::RedisEndpoint endpoint_;
  UniqueFd listener_;
  std::vector<std::string> received_;  // used by the thread only, until it has ended
  std::thread thread_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_SCRIPTED_REDIS_SERVER_H_
