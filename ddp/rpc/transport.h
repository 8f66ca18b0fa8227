#ifndef DDP_RPC_TRANSPORT_H_
#define DDP_RPC_TRANSPORT_H_

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/common/membership.h"
#include "ddp/rpc/meeting_point.h"
#include "ddp/rpc/message_fault.h"
#include "ddp/rpc/object_table.h"
#include "ddp/rpc/options.h"
#include "ddp/rpc/pending_sends.h"
#include "ddp/rpc/registry.h"

namespace c10d {
class Store;
}  // namespace c10d
namespace ddp::internal {
class FailureMonitor;
class GroupStore;
struct GroupFailure;
}  // namespace ddp::internal
namespace torch::distributed::rpc {
class RpcAgent;
}  // namespace torch::distributed::rpc

namespace ddp::rpc::internal {

// This worker's connections: LibTorch's TensorPipe agent, with our registry in place of its Python
// or TorchScript functions, and with an end of all waits when a worker fails. The only file that
// knows the agent's life is transport.cc.
//
// Every answer of a function is a tuple: (true, value), or (false, kind, rank, message, stack) of
// an exception. So an exception of a function arrives as data and not as LibTorch's error text.
//
// Thread-safe, apart from construction, Stop() and destruction. A process has one in its life,
// because parts of LibTorch keep the first agent for ever.
class Transport {
 public:
  using Future = c10::ivalue::Future;
  using FuturePtr = c10::intrusive_ptr<Future>;

  static constexpr std::chrono::milliseconds kNoLimit{-1};

  // Connects. Blocks until all workers have come. Throws ConfigurationError for unusable arguments
  // and for a second Transport of this process, CommunicationError when the others do not come.
  // `fault`: for tests; null: none.
  Transport(std::string name, const c10::intrusive_ptr<c10d::Store>& store, Options options,
            const std::shared_ptr<MessageFault>& fault);
  // Stops without waiting for the other workers.
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // Returns the Transport of this process. Throws ConfigurationError when there is none.
  static std::shared_ptr<Transport> Get();
  // The same; null when there is none.
  static std::shared_ptr<Transport> Find();
  static void Set(std::shared_ptr<Transport> transport);

  int id() const { return options_.rank; }
  int size() const { return options_.world_size; }
  const std::string& name() const { return name_; }
  // Throw ConfigurationError, with all names, for an unknown worker.
  int IdOf(const std::string& worker) const;
  const std::string& NameOf(int id) const;
  const std::vector<std::string>& names() const { return names_; }

  // Throws ConfigurationError, with the text of `name`, when `value` has a tensor that cannot
  // travel. LibTorch's own errors for these are assertions with a stack.
  static void CheckTensors(const c10::IValue& value, const std::function<std::string()>& name);

  // Sends a call. `record`: as a part of the autograd context of this thread. `timeout` 0: that of
  // the options.
  FuturePtr Send(int worker, const std::string& function, std::vector<c10::IValue> arguments,
                 std::chrono::milliseconds timeout = {}, bool record = false);

  // Returns the value in the answer of a completed call, on this thread: with `record`, the node
  // through which gradients leave is made here, in the order of this thread's nodes. Throws the
  // error of the call: see Throw().
  c10::IValue Receive(Future& future, int worker, const std::string& function);

  // Gives up the answer of a call outside of a context: releases the users that it carries.
  static void Drop(Future& future);

  // Throws what `error`, of a message to `worker`, means: PeerFailedError, TimeoutError,
  // RemoteError, or CommunicationError. `worker` -1: of a worker that the error's text may name.
  // Reports a lost worker to all others.
  [[noreturn]] void Throw(const std::exception_ptr& error, int worker, const std::string& function);

  // Blocks until all workers have come to this meeting. Throws PeerFailedError and TimeoutError,
  // and ConfigurationError, when one has come to another meeting: then this worker has reported its
  // failure with the same text.
  void Barrier(Meeting meeting, std::chrono::milliseconds timeout);

  // Makes worker 0 notice the end of each other worker's connection, and each other worker that of
  // worker 0's, by a call in progress to it that is answered at the end of shutdown(). So a death
  // is noticed and reported although nobody calls the dead worker. Call it when all workers can
  // answer.
  void WatchOthers();

  // Reports to all workers that this one cannot continue.
  void ReportFailure(const std::string& reason);

  // Ends the agent. `together`: after a barrier, so that no message is lost; then throws as
  // Barrier().
  void Stop(bool together);

  const Registry& registry() const { return options_.registry; }
  ObjectTable& objects() { return objects_; }

  // Returns the answer to a call: never throws what the function throws.
  c10::IValue Answer(const std::string& function, const std::vector<c10::IValue>& arguments);
  // Returns the future of the answer of a worker that has come to a meeting. Thread: any.
  FuturePtr Arrive(const std::vector<c10::IValue>& arguments);
  // Returns the future of the answer to a worker that watches this one. Thread: any.
  FuturePtr AddWatcher() { return meeting_point_.AddWatcher(); }

 private:
  std::shared_ptr<torch::distributed::rpc::RpcAgent> MakeAgent(
      const c10::intrusive_ptr<c10d::Store>& store, const std::shared_ptr<MessageFault>& fault);
  ddp::internal::Membership membership() const { return {.rank = id(), .size = size()}; }
  void Meet(const c10::intrusive_ptr<c10d::Store>& store);
  void AddOwnFunctions();
  void MakeMonitor(std::shared_ptr<ddp::internal::GroupStore> store);
  static std::exception_ptr Translate(const PendingSends::Receiver& receiver, Future& failed,
                                      std::optional<PendingSends::Lost>* lost);
  // Reports a failure that may be the consequence of one that another worker has reported before.
  // Throws the first of them, which all workers then know.
  [[noreturn]] void ThrowFound(const ddp::internal::GroupFailure& found);
  [[noreturn]] void ThrowFailure(const ddp::internal::GroupFailure& failure) const;
  [[noreturn]] void ThrowAnswer(const c10::IValue& answer, const std::string& worker,
                                const std::string& function);

  const std::string name_;
  Options options_;
  std::vector<std::string> names_;  // by id
  ObjectTable objects_;
  std::shared_ptr<PendingSends> sends_;
  std::shared_ptr<torch::distributed::rpc::RpcAgent> agent_;  // null after Stop()
  std::shared_ptr<ddp::internal::FailureMonitor> monitor_;

  Mutex mutex_;
  MeetingPoint meeting_point_;
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_TRANSPORT_H_
