#ifndef DDP_PROCESS_GROUP_H_
#define DDP_PROCESS_GROUP_H_

#include <chrono>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace ddp {

class Communicator;
class FailureNotice;
struct WorkerEnvironment;

struct ProcessGroupOptions {
  // "gloo" (tensors on the CPU), "nccl" (on GPUs; a build with --config=cuda), or empty: nccl where
  // this program has it and sees a GPU, else gloo.
  std::string backend;

  // How long one collective, the connecting included, may take before the group fails.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  // What this program believes the number of ranks to be; -1: whatever the environment says. A
  // launcher that started another number is an error instead of a wrong average.
  int expected_world_size = -1;
};

// The ranks of one generation of a job, connected: what a model reduces its gradients over.
//
// Made by init_process_group(). There is no default group inside the library: the program owns this
// one and hands it to what needs it.
//
// A group in which a collective failed is of no use any more: every further call throws. Under
// ddprun let the exception end the process; the job goes on in a new generation.
//
// With Gloo the process ignores SIGPIPE from here on, unless the program handles it: a broken
// connection is an error and not the end.
//
// Collectives: all ranks call the same ones in the same order. Thread-compatible. Owns the
// connections, and one thread that waits for news of failing peers.
class ProcessGroup {
 public:
  // Over any c10d store, for programs that have one already. `store` must be fresh: keys of an
  // earlier group with the same prefix would be taken for this one's. Throws as
  // init_process_group() does.
  struct Place {
    int rank = 0;
    int size = 1;
    int local_rank = 0;  // which GPU
    int local_size = 1;  // equal to `size`: all ranks are on this host
  };
  ProcessGroup(c10::intrusive_ptr<c10d::Store> store, const Place& place,
               const ProcessGroupOptions& options = {});
  // While an exception passes by, tells the peers that this rank ends because of one.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  const std::string& backend() const { return backend_; }

  // Where this rank's tensors belong: the CPU, or its GPU.
  at::Device device() const;

  // Shared by all ranks, for keys of the program's own (torch/csrc/distributed/c10d/Store.hpp).
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // The sum over all ranks, in place. Blocks; on a GPU it orders the current stream instead. Throws
  // CommunicationError and PeerFailedError, as all collectives here.
  void all_reduce(at::Tensor tensor);

  // Copies `root`'s tensor into the others'.
  void broadcast(at::Tensor tensor, int root = 0);

  // Returns when every rank has called it.
  void barrier();

  // Tells all ranks that this one cannot go on, so that nobody waits for it: their waits throw
  // PeerFailedError within a second. Never throws.
  void report_failure(const std::string& reason);

  // For the library's own use.
  Communicator& communicator() { return *communicator_; }

  // Counts the models and the like that are set up on this group, which needs no talk since all
  // ranks set them up in the same order. Names their keys.
  int next_sequence() { return sequence_++; }

 private:
  const Place place_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::string backend_;
  std::shared_ptr<FailureNotice> notice_;
  std::unique_ptr<Communicator> communicator_;
  int sequence_ = 0;
  const int exceptions_at_start_;
};

// Meets the other ranks of this job and connects to them. Call it once, first of all; blocks until
// all ranks came.
//
// The environment says who we are (RANK, WORLD_SIZE, LOCAL_RANK, ...) and where the ranks meet: at
// the Redis store that DDP_STORE names, as ddprun sets it; where that is unset, as under torchrun,
// at a TCPStore on MASTER_ADDR:MASTER_PORT, which rank 0 serves unless the launcher does.
//
// Throws ConfigurationError (environment incomplete or not numbers, world size other than expected,
// unknown backend) and CommunicationError (store or peers not reached in time), in one line.
std::shared_ptr<ProcessGroup> init_process_group(const ProcessGroupOptions& options = {});

}  // namespace ddp

#endif  // DDP_PROCESS_GROUP_H_
