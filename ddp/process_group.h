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

#include "ddp/common/reduce_op.h"
#include "ddp/work.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddp {

namespace internal {
class BackendFactory;
class Communicator;
class FailureMonitor;
class GroupStore;
struct CollectiveCaller;
struct PreparedCollective;
}  // namespace internal

// The arguments of a BackendMaker: what a program's own backend needs to connect.
struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // part of the group's store, for this backend alone
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int64_t incarnation = 0;                       // of the group
  std::chrono::milliseconds timeout{0};          // of one collective
  std::chrono::milliseconds connect_timeout{0};  // of connecting
};

// A program's function that connects the ranks with a c10d backend of its own. The group calls it
// on every rank at the same time: when the group is constructed, and in each renew() for the next
// incarnation.
//
// The group recognizes LibTorch's Gloo, also when the program makes it. With Gloo, collectives that
// differ between ranks are named in an error and corrupt nothing. Other backends, and a wrapper
// around Gloo, have no such check. A backend for GPUs must be bound to its device
// (setBoundDeviceId), and its works must have futures.
using BackendMaker = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>;

// Options of a ProcessGroup and of init_process_group().
struct ProcessGroupOptions {
  // "shm" (tensors on the CPU, all ranks on one host, through shared memory), "hierarchical" (CPU,
  // several hosts: shared memory inside a host, Gloo between hosts), "gloo" (CPU), "nccl" (on GPUs;
  // needs a build with --config=cuda), "nccl-legacy" (the older of the two engines that LibTorch
  // has from 2.15 on; TORCH_DIST_USE_NCCL2=0 makes "nccl" mean it, as in PyTorch), or empty. Empty:
  // the name in the environment variable DDP_BACKEND. Where that is unset or empty: nccl where this
  // program has it and sees a GPU; else shm for ranks of one host that can share memory; else
  // hierarchical where a host has several ranks; else gloo.
  std::string backend = {};

  // With the backend hierarchical: true: sums are taken in one balanced binary tree over the ranks
  // by number, the same for every division of the ranks among hosts. False: each host takes the sum
  // of its ranks first. The bits then depend on the hosts, but are the same on all ranks and in
  // every run. False sends less when a host's ranks are not 2^n ranks from a multiple of 2^n on.
  bool deterministic = true;

  // A function that makes the backend, instead of `backend`. Setting both is an error.
  BackendMaker make_backend = nullptr;

  // The time limit of one collective, and of connecting, after which the group fails. Connecting
  // again in renew() has at most one minute.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);

  // The number of ranks that this program expects; -1: any. With another number,
  // init_process_group() throws ConfigurationError, so that no wrong average is computed. The
  // constructors ignore this option.
  int expected_world_size = -1;
};

// The connected ranks of one generation of a job. A model averages its gradients over them, and a
// program runs its own collectives on them. The program makes the group with init_process_group(),
// owns it, and passes it on; the library has no default group.
//
// Failures. When a rank fails (a collective breaks, or report_failure() is called), every rank
// throws once. The group is then unusable until all ranks have built a new communicator, its next
// *incarnation*. The next synchronized forward of a DistributedDataParallel does this by
// ensure_usable(); a program does it by renew(). A rank is gone for good when it has ended, was
// killed or has left. Then every further call throws PeerFailedError with its number. Under ddprun,
// let that exception end the process; the job continues in a new generation.
//
// On a device with streams, backward() of a DistributedDataParallel returns before the averages are
// there, and so does the optimizer's step. A failure may come in between: the step then uses
// gradients of a reduction that was aborted. No such step stays in silence: after renew(), the next
// backward throws ReductionError on every rank, once. Load model and optimizer from a checkpoint on
// every rank. The backward after that compares the parameters of all ranks, and throws as long as
// they differ. It also does so, on the CPU too, when the ranks have completed different numbers of
// backwards before the failure.
//
// With Gloo, the process ignores SIGPIPE once a group exists, unless the program handles it. A
// broken connection is then an error and does not end the process.
//
// With shm and LibTorch's Gloo, collectives that differ between the ranks (another size, another
// operation, one batch less) throw CommunicationError on every rank after about a second. The
// message names the ranks, each collective and the remedy. With TORCH_DISTRIBUTED_DEBUG=DETAIL in
// the environment, every collective first compares its operation, shape and the like across the
// ranks. That is slow, but finds the error at once.
//
// Collectives. All ranks call the same ones in the same order, with tensors of the same types and
// sizes. Several may be in progress at once. Rules for all of them:
//
//   form      f() blocks; on a GPU it makes the current stream wait instead. f_async() starts the
//             same collective and returns a Work, whose wait() ends as f() does. The start blocks
//             in two cases: see the sized all_to_all, and sparse tensors in all_reduce.
//   device    Tensors are on device(). Checked with shm, gloo and nccl.
//   layout    Any strides. A contiguous tensor is used in place; any other costs a copy. Sparse
//             tensors: all_reduce only. A tensor without elements is allowed.
//   type      Every type can be moved. For types that can be reduced, see ReduceOp. The tensors of
//             one call have one type.
//   gradients Autograd records nothing: tensors are read and written as under NoGradGuard. A
//             backward that needs a value which a collective has overwritten throws.
//   errors    ConfigurationError: this rank's arguments are wrong; nothing has started.
//             CommunicationError and PeerFailedError: as above.
//
// Thread-compatible; report_failure() and failed() may be called from any thread. Owns the
// connections and one thread, which waits for failure reports of peers; shm has one more. Each
// message with shm or Gloo, and each reduce_scatter of Gloo, has a thread while it is in progress.
// While an exception unwinds the calling thread, another thread writes the group's reports into the
// store.
class ProcessGroup {
 public:
  // The place of this rank in the group, for the constructor below.
  struct Place {
    int rank = 0;
    int size = 1;
    int local_rank = 0;    // index of this rank's GPU
    int local_size = 1;    // how many ranks are on this host; 0: unknown
    int local_first = -1;  // the first of them, which the others follow; -1: rank - local_rank
    // The process of rank 0 serves the store: when the store is lost, rank 0 is gone.
    bool store_is_rank_0 = false;
  };
  // Connects over a store that the program has already: any c10d store with compareSet and add,
  // which all of LibTorch's have. `store` must be fresh: keys of an earlier group under the same
  // prefix would be mistaken for keys of this group. Blocks and throws as init_process_group()
  // does.
  ProcessGroup(c10::intrusive_ptr<c10d::Store> store, const Place& place,
               const ProcessGroupOptions& options = {});

  // Uses a c10d backend of any kind that the program has connected. The backend's rank and size
  // become the group's. Such a group has one incarnation: after a failure, renew() throws.
  // new_group() throws too. ProcessGroupOptions::make_backend has no such limits.
  template <std::derived_from<c10d::Backend> Backend>
  ProcessGroup(const c10::intrusive_ptr<Backend>& backend, c10::intrusive_ptr<c10d::Store> store,
               const ProcessGroupOptions& options = {})
      : ProcessGroup(std::move(store), PlaceOf(backend), OptionsFor(backend, options)) {}

  // Reports a failure to the peers when an exception is unwinding the stack. Tells ranks that wait
  // for this one in renew() that it has left. Blocks until both are written to the store; when the
  // store is lost, gives up after seconds. Never throws. In a child of fork() it does nothing.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const;
  int size() const;
  // Returns "shm", "gloo", "nccl", or the name that the program's own backend reports.
  const std::string& backend() const;

  // Returns the device on which this rank's tensors belong: the CPU, or this rank's GPU. That is
  // the rank's number on its host, modulo the devices that the process sees. For a program's own
  // backend: the device that it is bound to. If it is bound to none, this rank's GPU for a backend
  // with the name nccl, else the CPU.
  at::Device device() const;

  // Returns the store that all ranks share. The program may add keys of its own
  // (torch/csrc/distributed/c10d/Store.hpp).
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // Replaces `tensor` by the sum over all ranks, or by the result of `op`. Complex and sparse (COO)
  // tensors support the sum and the average only. A sparse tensor may have other indices on each
  // rank.
  //
  // With Gloo, a sparse tensor is reduced while no other collective is in progress: two at once
  // would corrupt the memory of LibTorch. So its start, and that of the next collective, first
  // wait for the earlier collectives, in the async form too, and throw as wait() does. No peer may
  // make one of these depend on a message that this rank sends later.
  void all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum);
  Work all_reduce_async(at::Tensor tensor, ReduceOp op = ReduceOp::kSum);

  // Copies rank `root`'s tensor into the tensors of the others.
  void broadcast(at::Tensor tensor, int root = 0);
  Work broadcast_async(at::Tensor tensor, int root = 0);

  // Copies the inputs of all ranks into the output, in rank order. The output has size() times as
  // many elements as the input: [size() * n, ...] or [size(), n, ...] for an input of [n, ...]. The
  // other form has one output for each rank, each with as many elements as the input.
  void all_gather(at::Tensor output, at::Tensor input);
  void all_gather(std::vector<at::Tensor> outputs, at::Tensor input);
  Work all_gather_async(at::Tensor output, at::Tensor input);
  Work all_gather_async(std::vector<at::Tensor> outputs, at::Tensor input);

  // Reduces the inputs of all ranks; rank r gets part r of the result. The input has size() times
  // as many elements as the output. The other form has one input for each rank.
  void reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::kSum);
  void reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs,
                      ReduceOp op = ReduceOp::kSum);
  Work reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::kSum);
  Work reduce_scatter_async(at::Tensor output, std::vector<at::Tensor> inputs,
                            ReduceOp op = ReduceOp::kSum);

  // Sends part r of the input to rank r, and writes the part from rank r into part r of the output.
  // Parts divide the first dimension and have equal sizes.
  void all_to_all(at::Tensor output, at::Tensor input);
  Work all_to_all_async(at::Tensor output, at::Tensor input);

  // The same for parts of different sizes, which may be 0. The sizes are size() numbers of rows for
  // each tensor; the other form has one tensor for each rank. Every pair of ranks must agree: a
  // rank receives as much as the other sends. The ranks first compare the sizes in one more
  // exchange, for which the async form blocks too. When sizes do not agree, all ranks throw.
  void all_to_all(at::Tensor output, at::Tensor input,
                  const std::vector<int64_t>& output_split_sizes,
                  const std::vector<int64_t>& input_split_sizes);
  void all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
  Work all_to_all_async(at::Tensor output, at::Tensor input,
                        const std::vector<int64_t>& output_split_sizes,
                        const std::vector<int64_t>& input_split_sizes);
  Work all_to_all_async(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);

  // Sends a message: rank `dst` receives what rank `src` sends. Both ranks give the same tag, and
  // tensors of one type and size. Messages between two ranks with one tag arrive in the order of
  // sending. Messages are not collectives: other ranks, and the order of collectives, do not
  // matter. send() may return before the receiver calls recv(), or may wait for that call. Two
  // ranks that send to each other first must therefore use the async form.
  //
  // With shm and Gloo, a rank that receives another type or size than was sent throws
  // CommunicationError, in wait() or in its next collective. The message names both; the other
  // ranks get a failure report. A rank whose peer has left or died throws PeerFailedError. A peer
  // that lives and never sends is waited for until the timeout. NCCL compares nothing and supports
  // tag 0 only. With NCCL, when two ranks send to each other, one of them must receive first.
  void send(at::Tensor tensor, int dst, int tag = 0);
  void recv(at::Tensor tensor, int src, int tag = 0);
  Work send_async(at::Tensor tensor, int dst, int tag = 0);
  Work recv_async(at::Tensor tensor, int src, int tag = 0);

  // Blocks until every rank has called barrier(); on a GPU the host waits too.
  void barrier();
  // Starts a barrier. On the CPU, the Work is complete when every rank has started the barrier.
  Work barrier_async();

  // A barrier through the store, which finds out which ranks are missing. Blocks until every rank
  // has called it. After `timeout`, it throws CommunicationError on every rank that has called it,
  // and on a rank that calls it later. The message names the lowest missing rank, or all missing
  // ranks with `wait_all_ranks`. The group stays usable. Throws PeerFailedError when a failure is
  // known (CommunicationError when the failure names no single rank), and CommunicationError when
  // the store fails.
  void monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks = false);

  // Returns a copy on the CPU of what collectives have written to `tensor`. On a device with
  // streams it blocks until they are complete, and throws PeerFailedError or CommunicationError
  // when a failure has aborted one: item() and cpu() would return wrong values then.
  at::Tensor to_host(const at::Tensor& tensor);

  // Reports to all ranks that this rank cannot continue. Their waits throw PeerFailedError within a
  // second. Never throws. For a caller that then throws itself: the next ensure_usable() of this
  // rank calls renew() at once. Thread: any.
  void report_failure(const std::string& reason);

  // The same for several groups. When one of them knows a failure already, the others get that one,
  // with the rank at fault instead of this rank. A group that has not that rank gets the failure
  // without a rank, so its calls throw CommunicationError. Ranks are compared among a group and
  // those that new_group() makes of it; other groups get `reason` from this rank.
  static void report_failure_to(const std::vector<ProcessGroup*>& groups,
                                const std::string& reason);

  // As report_failure(), for a caller that does not throw, such as a destructor. The next call of
  // this rank that needs the group throws.
  void report_failure_and_throw_later(const std::string& reason);

  // Returns true when some rank has failed in this incarnation. One atomic load. Thread: any.
  bool failed() const;

  // Makes the group usable after a failure. Every forward with gradients of a
  // DistributedDataParallel calls it first. Returns at once when nothing failed. Calls renew() when
  // this rank has thrown for the failure already. Otherwise throws:
  // - PeerFailedError with the rank and the reason;
  // - ReductionError when this rank itself reported the failure;
  // - CommunicationError when the failure names no single rank.
  // Throws PeerFailedError when a rank is gone for good.
  void ensure_usable();

  // Builds a new communicator with all ranks; the incarnation rises by one. Collective. Blocks
  // until all ranks have come: for a rank that is alive but busy, up to the group's timeout.
  // Without a failure, reports one first, so that the peers stop. Throws PeerFailedError with the
  // rank that will not come; every later call then throws it at once. Throws CommunicationError
  // when the store or the connecting fails; the call may then be repeated.
  void renew();

  // Returns the number of communicators before this one. Equal on all ranks while none is in
  // renew(). A model discards its operations in progress when the number changes.
  int64_t incarnation() const;

  // Makes a group of some of this group's ranks, on the same store. Collective over those ranks,
  // which all give the same set. The other ranks may call it too, and get nullptr at once. The
  // order in `ranks` does not matter: the new group numbers its ranks in rising order. Failures of
  // the new group do not affect this one. Throws ConfigurationError when `ranks` is empty, names a
  // rank twice, or names an unknown rank. Otherwise throws as the constructor does.
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks);

  // Returns the communicator, for the library itself. renew() replaces it.
  internal::Communicator& communicator();

  // Counts the models and similar objects that are set up on this group, to name their keys. All
  // ranks set them up in the same order, so the numbers agree without communication.
  int next_sequence() { return sequence_++; }

 private:
  struct Incarnation;  // replaced as a whole by renew()

  static Place PlaceOf(const c10::intrusive_ptr<c10d::Backend>& backend);
  static ProcessGroupOptions OptionsFor(const c10::intrusive_ptr<c10d::Backend>& backend,
                                        const ProcessGroupOptions& options);
  void Connect(std::chrono::milliseconds connect_timeout);
  internal::CollectiveCaller Caller() const;
  void CheckTag(int tag) const;
  Work Start(const internal::PreparedCollective& prepared, const char* what, int64_t index = -1);
  void CompareSizes(const internal::PreparedCollective& prepared);
  void ThrowIfGone() const;
  void RemoveKeys();
  void PassOn(const ProcessGroup& failed, const std::string& reason);

  const ProcessGroupOptions options_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<internal::GroupStore> control_;  // part of store_, not for collectives
  const std::shared_ptr<internal::BackendFactory> factory_;
  std::shared_ptr<internal::FailureMonitor> monitor_;
  std::unique_ptr<Incarnation> now_;
  std::map<std::string, int> new_groups_;  // how many, by their ranks
  // This group's ranks, by their numbers in the group that all new_group()s began with.
  std::vector<int> world_ranks_;
  std::shared_ptr<const char> world_ = std::make_shared<const char>();  // the identity of that one
  int sequence_ = 0;
  bool removes_keys_ = false;  // in the destructor: a group of new_group(), whose store lives on
  const int exceptions_at_start_;
};

// Connects this process to the other ranks of its job. Call it before anything else of the library.
// Blocks until all ranks have called it. A program may call it again, equally often on every rank:
// each call makes a group of its own, in its own part of the store. Where rank 0 serves the store,
// end an earlier group only after the next call has returned.
//
// Reads the environment: RANK, WORLD_SIZE, LOCAL_RANK and others for the place of this rank;
// DDP_STORE for the Redis store through which the ranks connect (ddprun sets it). Where DDP_STORE
// is unset, as under torchrun, they connect through a TCPStore on MASTER_ADDR:MASTER_PORT. Rank 0
// serves that store unless the launcher does.
//
// Throws ConfigurationError when the environment is incomplete or not numeric, the world size is
// not the expected one, or the backend is unknown. Throws CommunicationError when the store or the
// peers cannot be reached in time. Each message is one line.
std::shared_ptr<ProcessGroup> init_process_group(const ProcessGroupOptions& options = {});

// Returns true when `ok` is true on every rank. Collective: one reduction of a single number, and a
// wait for it on the host. Throws as ProcessGroup::all_reduce(). What one rank leaves out, all
// ranks must leave out, since each backward is a collective:
//
//   if (!ddp::all_agree(group, loss.isfinite().all().item<bool>())) continue;  // on all ranks
bool all_agree(const std::shared_ptr<ProcessGroup>& group, bool ok);

}  // namespace ddp

#endif  // DDP_PROCESS_GROUP_H_
