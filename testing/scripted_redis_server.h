#ifndef DDP_TESTING_SCRIPTED_REDIS_SERVER_H_
#define DDP_TESTING_SCRIPTED_REDIS_SERVER_H_

#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "store/redis_endpoint.h"

namespace ddp::testing {

// A server that follows a script, to say what a real Redis server never says. Owns one thread.
class ScriptedRedisServer {
 public:
  // What one connection answers: the first goes to the first bytes that the client sends, and so
  // on. After the last one the connection is closed.
  using Answers = std::vector<std::string>;

  // Takes one connection after the other.
  explicit ScriptedRedisServer(std::vector<Answers> connections);
  ~ScriptedRedisServer() { Finish(); }
  ScriptedRedisServer(const ScriptedRedisServer&) = delete;
  ScriptedRedisServer& operator=(const ScriptedRedisServer&) = delete;

  const store::RedisEndpoint& endpoint() const { return endpoint_; }

  // What the client sent, one entry per answer; ends the server, once the client is gone or the
  // script is at its end.
  std::vector<std::string> Finish();

 private:
  void Serve();

  const std::vector<Answers> connections_;
  char folder_[32] = "/tmp/ddp-test-XXXXXX";
  store::RedisEndpoint endpoint_;
  UniqueFd listener_;
  std::vector<std::string> received_;  // the thread's, until it has ended
  std::thread thread_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SCRIPTED_REDIS_SERVER_H_
