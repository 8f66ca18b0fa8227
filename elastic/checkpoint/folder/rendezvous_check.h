#ifndef DDP_ELASTIC_CHECKPOINT_FOLDER_RENDEZVOUS_CHECK_H_
#define DDP_ELASTIC_CHECKPOINT_FOLDER_RENDEZVOUS_CHECK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::elastic {

// Asks the rendezvous of a job whether a generation is still the newest. The rendezvous is on the
// same Redis server as the workers' store. Works without the agent, so a worker whose agent is
// stopped can ask too. Owned by a Checkpointer.
//
// Thread-compatible. Ask() opens a connection and closes it.
class RendezvousCheck {
 public:
  // Makes a check from the address of the generation's store, as in DDP_STORE. `timeout`: of one
  // Ask(). Connects to nothing. Errors: kInvalidArgument when the store is not that of a generation
  // of ddprun; those of store::ApplyRedisCredentialsFromEnvironment().
  static absl::StatusOr<std::unique_ptr<RendezvousCheck>> Of(const std::string& store_url,
                                                             absl::Duration timeout);

  // Returns the number of the job among the jobs of its run ID, from 1.
  int64_t instance() const { return instance_; }

  // Returns the job's token while this generation is the newest and the job has not ended. Blocks
  // up to `timeout`; only the lookup of a host name may take longer. Errors:
  // - kFailedPrecondition: another generation has begun, or the job has ended.
  // - kNotFound: the server has no record of this generation; it may have lost its data.
  // - The errors of RedisCaller.
  absl::StatusOr<std::string> Ask();

 private:
  RendezvousCheck() = default;

  std::string job_key_;
  int64_t instance_ = 0;
  uint64_t generation_ = 0;
  std::string nonce_;
  std::unique_ptr<store::RedisConnection> connection_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FOLDER_RENDEZVOUS_CHECK_H_
