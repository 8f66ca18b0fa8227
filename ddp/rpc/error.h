// The errors of calls between workers. A worker that is gone or has failed: ddp::PeerFailedError,
// whose rank() is the worker's id and whose message names the worker. A wrong use on this side,
// also a call after shutdown(): ddp::ConfigurationError.
#ifndef DDP_RPC_ERROR_H_
#define DDP_RPC_ERROR_H_

#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include "ddp/common/error.h"

namespace ddp::rpc {

// The called function threw, or the callee could not call it: no such function, or other arguments.
// what() is one line, without the callee's stack.
class RemoteError : public c10::Error {
 public:
  RemoteError(std::string worker, std::string function, std::string message,
              std::string remote_stack)
      : c10::Error(function + " on worker " + worker + ": " + message, nullptr),
        worker_(std::move(worker)),
        function_(std::move(function)),
        message_(std::move(message)),
        remote_stack_(std::move(remote_stack)) {}

  const std::string& worker() const { return worker_; }      // the callee
  const std::string& function() const { return function_; }  // "backward": of a backward's graph
  const std::string& message() const { return message_; }    // as thrown by the callee
  // Returns the callee's text of the exception, with its stack where the exception had one.
  const std::string& remote_stack() const { return remote_stack_; }

 private:
  std::string worker_, function_, message_, remote_stack_;
};

// A call had no answer in time. The callee may have run the function, or still run it.
class TimeoutError : public CommunicationError {
 public:
  explicit TimeoutError(const std::string& message) : CommunicationError(message) {}
};

namespace internal {

// A worker has failed, as opposed to a rank of some process group.
class WorkerFailed final : public PeerFailedError {
 public:
  using PeerFailedError::PeerFailedError;
};

}  // namespace internal

}  // namespace ddp::rpc

#endif  // DDP_RPC_ERROR_H_
