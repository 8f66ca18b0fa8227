#ifndef DDP_PROCESS_GROUP_H_
#define DDP_PROCESS_GROUP_H_

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/option.h"
#include "ddp/reduce_op.h"
#include "ddp/work.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddp {

namespace internal {
class Communicator;
class FailureNotice;
struct CollectiveCaller;
struct PreparedCollective;
}  // namespace internal

// The connections that a group asks a program's BackendMaker for.
struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // a part of the group's store that nobody else uses
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int64_t incarnation = 0;                       // of the group
  std::chrono::milliseconds timeout{0};          // of one collective
  std::chrono::milliseconds connect_timeout{0};  // of the connecting
};

// Connects the ranks by a c10d backend of the program's own. Called on every rank at the same time:
// at the group's start, and after each failure for the next incarnation.
//
// The group uses LibTorch's Gloo, also a program's own, so that collectives which differ between
// ranks are named and harm nothing. It cannot do so for other backends, nor for one that wraps
// Gloo. A backend for GPUs is bound to its device (setBoundDeviceId), and its works have futures.
using BackendMaker = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>;

struct ProcessGroupOptions {
  using Self = ProcessGroupOptions;

  // "gloo" (tensors on the CPU), "nccl" (on GPUs; a build with --config=cuda), or empty: nccl where
  // this program has it and sees a GPU, else gloo.
  DDP_OPTION(backend, std::string) = {};

  // In place of `backend`: the program makes the backend itself.
  DDP_OPTION(make_backend, BackendMaker) = nullptr;

  // How long one collective, the connecting included, may take before the group fails.
  DDP_OPTION(timeout, std::chrono::milliseconds) = std::chrono::minutes(30);

  // What this program believes the number of ranks to be; -1: whatever the environment says. A
  // launcher that started another number is an error instead of a wrong average.
  DDP_OPTION(expected_world_size, int) = -1;
};

// The ranks of one generation of a job, connected: what a model reduces its gradients over.
//
// Made by init_process_group(). There is no default group inside the library: the program owns this
// one and hands it to what needs it.
//
// When a rank fails (a collective breaks, or report_failure()), every rank throws once, and the
// group is of no use until all ranks have built a new communicator: its next *incarnation*. The
// next synchronized forward of a DistributedDataParallel does that by ensure_usable(), or a program
// by renew(). A rank that is gone for good (it ended, was killed, left) makes every further call
// throw PeerFailedError with its number: under ddprun let the exception end the process; the job
// goes on in a new generation.
//
// With Gloo the process ignores SIGPIPE from here on, unless the program handles it: a broken
// connection is an error and not the end.
//
// Collectives that differ between the ranks (another size, another operation, one batch less) throw
// CommunicationError on every rank after about a second, with LibTorch's Gloo. It names the ranks,
// each collective and the remedy.
//
// TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment makes every collective compare its operation,
// shape and the like across the ranks first. Slow, and the error comes without that second.
//
// Collectives. All ranks call the same ones in the same order, with tensors of the same types and
// sizes; several may be under way. All obey these rules:
//
//   form      f() blocks; on a GPU it orders the current stream instead. f_async() starts the same
//             and returns a Work; its wait() ends as f() does.
//   device    Tensors lie on device().
//   layout    Any strides. A contiguous tensor is used where it lies; any other costs a copy.
//             Sparse tensors: all_reduce only. A tensor without elements is allowed.
//   type      Data of every type is moved. What is reduced, see ReduceOp. The tensors of one call
//             are of one type.
//   gradients None go through a collective: tensors are read and written as under NoGradGuard.
//   errors    ConfigurationError: this rank's arguments; nothing has started. CommunicationError
//             and PeerFailedError: as above.
//
// Thread-compatible, but for report_failure() and failed(), which any thread may call. Owns the
// connections, and one thread that waits for news of failing peers. With Gloo each message and each
// reduce_scatter has a thread while it is under way.
class ProcessGroup {
 public:
  // Over any c10d store with compareSet and add (all of LibTorch's have them), for programs that
  // have one already. `store` must be fresh: keys of an earlier group with the same prefix would be
  // taken for this one's. Throws as init_process_group() does.
  struct Place {
    int rank = 0;
    int size = 1;
    int local_rank = 0;  // which GPU
    int local_size = 1;  // equal to `size`: all ranks are on this host
    // The process of rank 0 serves the store: with a store that is lost, rank 0 is gone.
    bool store_is_rank_0 = false;
  };
  ProcessGroup(c10::intrusive_ptr<c10d::Store> store, const Place& place,
               const ProcessGroupOptions& options = {});

  // Over a c10d backend that the program has connected, of any kind. Its rank and its size become
  // the group's. A group like this has one incarnation: after a failure, renew() throws. So does
  // new_group(). ProcessGroupOptions::make_backend has no such limits.
  template <std::derived_from<c10d::Backend> Backend>
  ProcessGroup(const c10::intrusive_ptr<Backend>& backend, c10::intrusive_ptr<c10d::Store> store,
               const ProcessGroupOptions& options = {})
      : ProcessGroup(std::move(store), PlaceOf(backend), OptionsFor(backend, options), "") {}

  // While an exception passes by, tells the peers that this rank ends because of one. Ranks that
  // wait for this one to renew the group learn that it has left.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  // "gloo", "nccl", or the name that the program's own backend gives itself.
  const std::string& backend() const { return backend_; }

  // Where this rank's tensors belong: the CPU, or its GPU. Of a program's own backend: the device
  // it is bound to, for one that calls itself nccl the GPU of this rank, else the CPU.
  at::Device device() const { return device_; }

  // Shared by all ranks, for keys of the program's own (torch/csrc/distributed/c10d/Store.hpp).
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // The sum over all ranks, or what `op` says, in place. Complex and sparse (COO) tensors may have
  // the sum and the average; ranks may have other indices in a sparse tensor.
  void all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum);
  Work all_reduce_async(at::Tensor tensor, ReduceOp op = ReduceOp::kSum);

  // Copies `root`'s tensor into the others'.
  void broadcast(at::Tensor tensor, int root = 0);
  Work broadcast_async(at::Tensor tensor, int root = 0);

  // Copies the inputs of all ranks into the output, by rank: size() times as many elements, such as
  // [size() * n, ...] or [size(), n, ...] for an input of [n, ...]. Or into one output for each
  // rank, with as many elements as the input.
  void all_gather(at::Tensor output, at::Tensor input);
  void all_gather(std::vector<at::Tensor> outputs, at::Tensor input);
  Work all_gather_async(at::Tensor output, at::Tensor input);
  Work all_gather_async(std::vector<at::Tensor> outputs, at::Tensor input);

  // Reduces the inputs and leaves to each rank its part, by rank: the output, of which the input
  // has size() times the elements. Or from one input for each rank.
  void reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::kSum);
  void reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs,
                      ReduceOp op = ReduceOp::kSum);
  Work reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::kSum);
  Work reduce_scatter_async(at::Tensor output, std::vector<at::Tensor> inputs,
                            ReduceOp op = ReduceOp::kSum);

  // Sends part r of the input to rank r, and puts what rank r sends here into part r of the output.
  // Parts go along the first dimension, and are of one size.
  void all_to_all(at::Tensor output, at::Tensor input);
  Work all_to_all_async(at::Tensor output, at::Tensor input);

  // The same for parts of different sizes, which may be 0: size() numbers of rows each, or one
  // tensor for each rank. Ranks may differ in all sizes, as long as a rank receives as much as the
  // other sends. The ranks compare that first, also in the async form: one exchange more, which the
  // call waits for. Where it is not so, all ranks throw.
  void all_to_all(at::Tensor output, at::Tensor input,
                  const std::vector<int64_t>& output_split_sizes,
                  const std::vector<int64_t>& input_split_sizes);
  void all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
  Work all_to_all_async(at::Tensor output, at::Tensor input,
                        const std::vector<int64_t>& output_split_sizes,
                        const std::vector<int64_t>& input_split_sizes);
  Work all_to_all_async(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);

  // A message: rank `dst` gets what rank `src` sends. Both name the same tag and have tensors of
  // one type and size. Messages between two ranks with one tag arrive in the order of sending.
  // send() may return before the receiver has called recv(); it may also wait for it, so two ranks
  // that send to each other first need the async form. These are no collectives: other ranks and
  // the order of collectives do not matter.
  //
  // With Gloo, a rank that receives another type or size than is sent throws CommunicationError
  // with both, in wait() or its next collective, and the others hear of it. A rank whose peer has
  // left or died throws PeerFailedError; a peer that lives and never sends is waited for until the
  // timeout. NCCL compares nothing and has no tags but 0; there one of two ranks receives first.
  void send(at::Tensor tensor, int dst, int tag = 0);
  void recv(at::Tensor tensor, int src, int tag = 0);
  Work send_async(at::Tensor tensor, int dst, int tag = 0);
  Work recv_async(at::Tensor tensor, int src, int tag = 0);

  // Returns when every rank has called it; on a GPU the host waits as well.
  void barrier();
  // On the CPU the Work is complete when every rank has called it.
  Work barrier_async();

  // The same through the store, to find out who is missing: after `timeout` every rank that came,
  // and one that comes later, throws CommunicationError with the lowest missing rank, or with all
  // of them. The group stays usable. Throws PeerFailedError when a failure is known.
  void monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks = false);

  // Tells all ranks that this one cannot go on, so that nobody waits for it: their waits throw
  // PeerFailedError within a second. Never throws. The caller is about to throw itself, so
  // ensure_usable() goes on to renew() at once.
  void report_failure(const std::string& reason);

  // The same for a caller that does not throw, such as a destructor: the next call of this rank
  // that needs the group throws.
  void report_failure_and_throw_later(const std::string& reason);

  // Whether some rank has failed in this incarnation. One atomic load.
  bool failed() const;

  // Called at the start of every synchronized forward. Returns at once when nothing failed. After a
  // failure for which this rank has not thrown yet, throws PeerFailedError naming rank and reason;
  // after one for which it has, renews the group.
  void ensure_usable();

  // All ranks meet and build a new communicator; the incarnation is one more. Blocks until all
  // have come: a rank that is alive, but busy, for up to the group's timeout. Throws
  // PeerFailedError naming a rank that will not come, as does every later call, at once; and
  // CommunicationError when the store or the connecting fails, after which it may be tried again.
  void renew();

  // The number of communicators before this one. Equal on all ranks whenever none of them is in
  // renew(). What a model keeps about operations under way is void when it changes.
  int64_t incarnation() const { return incarnation_; }

  // A group of some of this one's ranks, on the same store. Collective over those ranks, which all
  // name the same set; the others may call it too and get nullptr at once. The order does not
  // matter: the new group numbers them in rising order. Its failures are its own. Throws
  // ConfigurationError (no rank, one twice, one that is not here), and as the constructor does.
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks);

  // For the library's own use; another one after renew().
  internal::Communicator& communicator() { return *communicator_; }

  // Counts the models and the like that are set up on this group, which needs no talk since all
  // ranks set them up in the same order. Names their keys.
  int next_sequence() { return sequence_++; }

 private:
  ProcessGroup(c10::intrusive_ptr<c10d::Store> store, const Place& place,
               const ProcessGroupOptions& options, std::string backend);
  static Place PlaceOf(const c10::intrusive_ptr<c10d::Backend>& backend);
  static ProcessGroupOptions OptionsFor(const c10::intrusive_ptr<c10d::Backend>& backend,
                                        const ProcessGroupOptions& options);
  void Connect(std::chrono::milliseconds connect_timeout);
  c10::intrusive_ptr<c10d::Backend> MakeBackend(std::chrono::milliseconds connect_timeout);
  c10::intrusive_ptr<c10d::Backend> MakeOwnBackend(std::chrono::milliseconds connect_timeout);
  internal::CollectiveCaller Caller() const;
  Work Start(const internal::PreparedCollective& prepared, const char* what, int64_t index = -1);
  void CompareSizes(const internal::PreparedCollective& prepared);
  void ThrowIfGone() const;
  void RemoveKeys();

  const Place place_;
  const ProcessGroupOptions options_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<c10d::Store> control_;  // store_'s part for what is no collective
  std::string backend_;
  std::shared_ptr<internal::FailureNotice> notice_;
  std::shared_ptr<internal::Communicator> communicator_;
  at::Device device_{at::kCPU};
  int64_t incarnation_ = 0;
  int64_t barriers_ = 0;                   // monitored ones of this incarnation
  std::map<std::string, int> new_groups_;  // by their ranks
  int sequence_ = 0;
  bool removes_keys_ = false;  // at its end: a part of a group that goes on
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
