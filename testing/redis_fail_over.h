#ifndef DDP_TESTING_REDIS_FAIL_OVER_H_
#define DDP_TESTING_REDIS_FAIL_OVER_H_

#include <memory>
#include <string>
#include <vector>

#include "store/redis_connection.h"
#include "store/redis_endpoint.h"
#include "testing/redis_fixture.h"

namespace ddp::testing {

// Two real Redis servers, a master and its replica, and one name that leads to the master. Where
// this process may mount files (root), the name is a host's in an /etc/hosts that nobody else sees;
// else it is a link to the master's socket.
//
// Thread-compatible. Create it in the main thread, before any other thread looks up a name.
class RedisFailOver {
 public:
  RedisFailOver();
  ~RedisFailOver();
  RedisFailOver(const RedisFailOver&) = delete;
  RedisFailOver& operator=(const RedisFailOver&) = delete;

  // The name.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }
  bool has_host_name() const { return !endpoint_.is_unix(); }

  // The two change their roles, as Sentinel makes them: no connection ends. The name still leads to
  // the old master.
  void ChangeRoles();
  // From now on the name leads to the new master.
  void MoveName();

  // What `command` answers, asked of a server by its own address.
  std::string AskFirst(const std::vector<std::string>& command) { return Ask(*first_, command); }
  std::string AskSecond(const std::vector<std::string>& command) { return Ask(*second_, command); }

 private:
  static std::string Ask(store::RedisConnection& connection,
                         const std::vector<std::string>& command);
  bool MountHosts();
  void PointTo(const std::string& address, const RedisFixture& server);

  std::string folder_;
  std::unique_ptr<RedisFixture> first_server_;
  std::unique_ptr<RedisFixture> second_server_;
  std::unique_ptr<store::RedisConnection> first_;
  std::unique_ptr<store::RedisConnection> second_;
  store::RedisEndpoint endpoint_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_FAIL_OVER_H_
