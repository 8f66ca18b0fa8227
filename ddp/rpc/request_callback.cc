#include "ddp/rpc/request_callback.h"

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_autograd.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include "ddp/common/error.h"
#include "ddp/rpc/ending_agent.h"
#include "ddp/rpc/failure/engine_error.h"
#include "ddp/rpc/transport.h"

namespace ddp::rpc::internal {

namespace libtorch_autograd = torch::distributed::autograd;

c10::intrusive_ptr<libtorch::JitFuture> RequestCallback::processScriptCall(
    libtorch::RpcCommandBase& rpc, const std::vector<c10::Stream>& streams) const {
  auto& call = static_cast<libtorch::ScriptCall&>(rpc);
  const std::string name =
      call.hasQualifiedName() ? call.qualifiedName().qualifiedName() : "an operator";
  if (name != kBarrier && name != kWatch) {
    return asFuture(libtorch::ScriptResp(transport_->Answer(name, call.stackRef())).toMessage());
  }
  // These answers come later, and occupy no thread.
  const auto answer =
      name == kBarrier ? transport_->Arrive(call.stackRef()) : transport_->AddWatcher();
  return answer->then(
      [](libtorch::JitFuture& answer) {
        auto message = libtorch::ScriptResp(answer.value()).toMessage();
        return libtorch::withStorages(std::move(message));
      },
      c10::AnyClassType::get());
}

c10::intrusive_ptr<libtorch::JitFuture> RequestCallback::processScriptRemoteCall(
    libtorch::RpcCommandBase& rpc, const std::vector<c10::Stream>& streams) const {
  return asFuture(std::make_exception_ptr(
      ConfigurationError("LibTorch's own RRefs are not supported: use ddp::rpc::remote()")));
}

c10::intrusive_ptr<libtorch::JitFuture> RequestCallback::processRpcWithErrors(
    libtorch::RpcCommandBase& rpc, const libtorch::MessageType& type,
    const std::vector<c10::Stream>& streams) const {
  if (type == libtorch::CLEANUP_AUTOGRAD_CONTEXT_REQ) {
    ended_contexts_.Add(
        static_cast<libtorch_autograd::CleanupAutogradContextReq&>(rpc).getContextId());
  }
  int64_t context = -1;
  if (type == libtorch::FORWARD_AUTOGRAD_REQ) {
    context =
        static_cast<libtorch_autograd::RpcWithAutograd&>(rpc).autogradMetadata().autogradContextId;
  }
  auto answer = RequestCallbackNoPython::processRpcWithErrors(rpc, type, streams);
  if (context >= 0 && ended_contexts_.Contains(context)) {
    libtorch_autograd::DistAutogradContainer::getInstance().releaseContextIfPresent(context);
  }
  return answer->completed() && !answer->hasError() ? answer : Annotated(*answer);
}

c10::intrusive_ptr<libtorch::JitFuture> RequestCallback::Annotated(
    libtorch::JitFuture& answer) const {
  auto result = c10::make_intrusive<libtorch::JitFuture>(c10::AnyClassType::get());
  answer.addCallback([result, worker = transport_->id()](libtorch::JitFuture& ended) {
    if (!ended.hasError()) return result->markCompleted(ended.constValue(), ended.storages());
    result->setError(std::make_exception_ptr(std::runtime_error(
        kErrorOnNode + std::to_string(worker) + ": " + ended.tryRetrieveErrorMessage())));
  });
  return result;
}

}  // namespace ddp::rpc::internal
