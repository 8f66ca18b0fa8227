#ifndef DDP_TESTING_REDIS_REDIS_FAIL_OVER_H_
#define DDP_TESTING_REDIS_REDIS_FAIL_OVER_H_

#include <memory>
#include <string>
#include <vector>

#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::testing {

// Two real Redis servers, a master and its replica, and one name of the master. For a process that
// may mount files (root), the name is a host name in a private /etc/hosts. Otherwise the name is a
// link to the master's socket.
//
// Thread-compatible. Create it in the main thread, before any other thread looks up a name.
class RedisFailOver {
 public:
  RedisFailOver();
  ~RedisFailOver();
  RedisFailOver(const RedisFailOver&) = delete;
  RedisFailOver& operator=(const RedisFailOver&) = delete;

  // The endpoint with the name.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }
  bool has_host_name() const { return !endpoint_.is_unix(); }

  // Swaps the roles of the servers, as Sentinel does; no connection ends. The name still refers to
  // the old master.
  void ChangeRoles();
  // Makes the name refer to the new master.
  void MoveName();
  // Makes the name refer to both servers, the first one first. Needs has_host_name().
  void NameBoth();

  // Return the reply to `command` of the first or second server, reached by its own address.
  std::string AskFirst(const std::vector<std::string>& command) { return Ask(*first_, command); }
  std::string AskSecond(const std::vector<std::string>& command) { return Ask(*second_, command); }

 private:
  static std::string Ask(store::RedisConnection& connection,
                         const std::vector<std::string>& command);
  bool MountHosts();
  void WriteHosts(const std::vector<std::string>& addresses);
  void PointTo(const std::string& address, const RedisFixture& server);

  std::string folder_;
  std::unique_ptr<RedisFixture> first_server_;
  std::unique_ptr<RedisFixture> second_server_;
  std::unique_ptr<store::RedisConnection> first_;
  std::unique_ptr<store::RedisConnection> second_;
  store::RedisEndpoint endpoint_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_REDIS_FAIL_OVER_H_
