#ifndef DDP_ELASTIC_CHECKPOINT_RENDEZVOUS_CHECK_H_
#define DDP_ELASTIC_CHECKPOINT_RENDEZVOUS_CHECK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "store/redis_connection.h"
#include "store/redis_endpoint.h"

namespace ddp::elastic {

// Asks the rendezvous of a job, which lies beside the workers' store in Redis, whether a generation
// is still the newest. Needs no agent: a worker whose agent is stopped asks too.
//
// Thread-compatible. Keeps no connection between two questions.
class RendezvousCheck {
 public:
  // `store_url`: the address of the generation's store, as DDP_STORE has it. `timeout`: of one
  // question. Does no I/O. kInvalidArgument: the store is not that of a generation of ddprun, or
  // the credentials in the environment are not usable.
  static absl::StatusOr<std::unique_ptr<RendezvousCheck>> Of(const std::string& store_url,
                                                             absl::Duration timeout);

  // The number of the job among the jobs of its run id, from 1.
  int64_t instance() const { return instance_; }

  // The job's token, when no later generation has begun and the job has not ended. Errors:
  // kFailedPrecondition: it has. kNotFound: the server knows nothing of this generation; it may
  // have lost its memory. Others: those of RedisCaller.
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

#endif  // DDP_ELASTIC_CHECKPOINT_RENDEZVOUS_CHECK_H_
