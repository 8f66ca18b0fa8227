#ifndef DDP_TESTING_REDIS_SENTINELS_H_
#define DDP_TESTING_REDIS_SENTINELS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "store/redis/redis_endpoint.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::testing {

// A real master, its replica, and three real Redis Sentinels with a quorum of two, all at free
// ports of 127.0.0.1. A master that is gone for 300 ms is replaced.
//
// Thread-compatible. Create it in the main thread.
class Sentinels {
 public:
  // Returns when the sentinels know each other and the replica.
  Sentinels();
  ~Sentinels();
  Sentinels(const Sentinels&) = delete;
  Sentinels& operator=(const Sentinels&) = delete;

  // redis+sentinel://... with all three.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }

  // Ends the first master.
  void KillMaster() { master_->Kill(); }

  // Makes the replica the master while the first master goes on, as its replica.
  void FailOver();

  int replica_port() const { return replica_->endpoint().port; }

 private:
  void StartSentinel(int port);
  bool AllKnowAll() const;

  std::string folder_;
  std::unique_ptr<RedisFixture> master_;
  std::unique_ptr<RedisFixture> replica_;
  std::vector<pid_t> sentinels_;
  store::RedisEndpoint endpoint_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_SENTINELS_H_
