#ifndef DDP_RPC_REQUEST_CALLBACK_H_
#define DDP_RPC_REQUEST_CALLBACK_H_

#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>

#include "ddp/rpc/ended_contexts.h"

namespace ddp::rpc::internal {

namespace libtorch = torch::distributed::rpc;

inline constexpr char kBarrier[] = "ddp.rpc.barrier";

class Transport;

// Calls the functions of our registry.
class RequestCallback final : public libtorch::RequestCallbackNoPython {
 public:
  explicit RequestCallback(Transport* transport) : transport_(transport) {}

 protected:
  c10::intrusive_ptr<libtorch::JitFuture> processScriptCall(
      libtorch::RpcCommandBase& rpc, const std::vector<c10::Stream>& streams) const override;

  c10::intrusive_ptr<libtorch::JitFuture> processScriptRemoteCall(
      libtorch::RpcCommandBase& rpc, const std::vector<c10::Stream>& streams) const override;

  c10::intrusive_ptr<libtorch::JitFuture> processRpcWithErrors(
      libtorch::RpcCommandBase& rpc, const libtorch::MessageType& type,
      const std::vector<c10::Stream>& streams) const override;

  // LibTorch's function crashes for an RRef with two users.
  void handleRRefDelete(c10::intrusive_ptr<libtorch::RRef>& rref) const override {}

 private:
  // LibTorch says where an exception was thrown, but not where a later error is from: a message of
  // a backward that waits for a third worker. The sender would take the text of such an error for
  // the end of its connection.
  c10::intrusive_ptr<libtorch::JitFuture> Annotated(libtorch::JitFuture& answer) const;

  Transport* const transport_;
  mutable EndedContexts ended_contexts_;
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_REQUEST_CALLBACK_H_
