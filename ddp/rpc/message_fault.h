// For the tests of this library: messages that are lost or late. LibTorch's FaultyTensorPipeAgent
// (Options::Faults) cannot name the messages of a call within a context and of a backward.
#ifndef DDP_RPC_MESSAGE_FAULT_H_
#define DDP_RPC_MESSAGE_FAULT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/rpc/options.h"

namespace c10d {
class Store;
}  // namespace c10d
namespace ddp::rpc {
class Workers;
}  // namespace ddp::rpc

namespace ddp::rpc::internal {

// Decides about each message that this worker sends. Thread-safe.
class MessageFault {
 public:
  using Future = c10::ivalue::Future;
  using FuturePtr = c10::intrusive_ptr<Future>;

  struct Message {
    int type = 0;     // LibTorch's MessageType
    int worker = -1;  // the receiver
    // Sends the message. Returns the future of the answer. Thread: any, until the end of Workers.
    std::function<FuturePtr()> send;
    // Returns the future of an answer that never comes. The future fails after `limit`, or when the
    // connection breaks. nullopt: the time limit of the message.
    std::function<FuturePtr(std::optional<std::chrono::milliseconds> limit)> lose;
  };

  virtual ~MessageFault() = default;

  // Returns the future for which the sender waits.
  virtual FuturePtr OnSend(const Message& message) = 0;
};

// init() for a worker whose messages `fault` decides about; null: none.
std::unique_ptr<Workers> InitWithFault(std::string name,
                                       const c10::intrusive_ptr<c10d::Store>& store,
                                       Options options, std::shared_ptr<MessageFault> fault);

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_MESSAGE_FAULT_H_
