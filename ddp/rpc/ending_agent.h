#ifndef DDP_RPC_ENDING_AGENT_H_
#define DDP_RPC_ENDING_AGENT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/rpc_messages/propagate_gradients_req.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/script_call.h>

#include "ddp/rpc/message_fault.h"
#include "ddp/rpc/pending_sends.h"

namespace ddp::rpc::internal {

// The call with which a worker watches another one: the answer comes when the callee ends.
inline constexpr char kWatch[] = "ddp.rpc.watch";

inline c10::intrusive_ptr<torch::distributed::rpc::Message> CallMessage(
    const std::string& function, std::vector<c10::IValue> arguments) {
  return torch::distributed::rpc::ScriptCall(c10::QualifiedName(function), std::move(arguments))
      .toMessage();
}

// An agent of LibTorch whose messages end when a worker fails. Base: the agent's class.
template <typename Base>
class EndingAgent final : public Base {
 public:
  using Message = torch::distributed::rpc::Message;
  using MessagePtr = c10::intrusive_ptr<Message>;
  using FuturePtr = PendingSends::FuturePtr;
  using WorkerInfo = torch::distributed::rpc::WorkerInfo;

  template <typename... A>
  explicit EndingAgent(std::shared_ptr<PendingSends> sends, std::shared_ptr<MessageFault> fault,
                       A&&... arguments)
      : Base(std::forward<A>(arguments)...), sends_(std::move(sends)), fault_(std::move(fault)) {}

  FuturePtr send(const WorkerInfo& to, MessagePtr message, const float timeout_seconds,
                 const torch::distributed::rpc::DeviceMap& device_map) override {
    // LibTorch's engine tells the context of the message's error through a plain pointer. After a
    // failed backward, a program may end the context while other messages have no answer yet.
    std::shared_ptr<void> keep;
    if (message->type() == torch::distributed::rpc::BACKWARD_AUTOGRAD_REQ) {
      keep = ContextOf(*message);
    }
    return sends_->Track(
        {.worker = to.id_, .name = to.name_},
        [&] {
          if (fault_ != nullptr) return SendFaulty(to, std::move(message), timeout_seconds);
          return Base::send(to, std::move(message), timeout_seconds, device_map);
        },
        std::move(keep));
  }

 private:
  // Without a device map: this library sets none.
  FuturePtr SendFaulty(const WorkerInfo& to, MessagePtr message, float timeout_seconds) {
    const int type = message->type();
    const auto send = [this, to](MessagePtr sent, float seconds) {
      return Base::send(to, std::move(sent), seconds, {});
    };
    // The answer of this call comes at the end of the receiver.
    const auto lose = [send, timeout_seconds](std::optional<std::chrono::milliseconds> limit) {
      return send(CallMessage(kWatch, {}), limit.has_value()
                                               ? std::chrono::duration<float>(*limit).count()
                                               : timeout_seconds);
    };
    return fault_->OnSend(
        {.type = type,
         .worker = to.id_,
         .send = [send, message, timeout_seconds] { return send(message, timeout_seconds); },
         .lose = lose});
  }

  // Returns the context of a message of a backward; null: it has ended.
  static std::shared_ptr<void> ContextOf(const Message& message) {
    using torch::distributed::autograd::PropagateGradientsReq;
    const auto request = PropagateGradientsReq::fromMessage(message);
    const int64_t id = request->getAutogradMetadata().autogradContextId;
    try {
      return torch::distributed::autograd::DistAutogradContainer::getInstance().retrieveContext(id);
    } catch (const c10::Error&) {
      return nullptr;
    }
  }

  const std::shared_ptr<PendingSends> sends_;
  const std::shared_ptr<MessageFault> fault_;  // null: none
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_ENDING_AGENT_H_
