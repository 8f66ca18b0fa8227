#include "ddp/comm/hierarchical/gloo_link.h"

#include <algorithm>
#include <exception>

#include <ATen/ops/from_blob.h>

#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/common/error.h"

namespace ddp::internal {
struct GlooLink::Message : Transfer {
  explicit Message(GlooLink* link) : link(link) {}
  ~Message() override {
    MutexLock lock(link->mutex_);
    link->in_progress_.erase(this);
  }
  absl::Status Wait(absl::Duration timeout) override {
    if (!work) return error;
    const auto limit = std::clamp(timeout, absl::Milliseconds(1), CondVar::kLongestWait);
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + limit;
    try {
      if (work->wait(absl::ToChronoMilliseconds(limit))) return absl::OkStatus();
      return absl::UnavailableError("Connection closed: the group ends");
    } catch (const std::exception& failure) {
      // Gloo counts whole milliseconds.
      const bool late = clock.Now() + absl::Milliseconds(1) >= deadline;
      return late ? absl::DeadlineExceededError(MessageOf(failure))
                  : absl::UnavailableError(MessageOf(failure));
    }
  }

  GlooLink* const link;
  c10::intrusive_ptr<c10d::Work> work;  // null when the start has failed
  absl::Status error;
};

GlooLink::GlooLink(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

std::unique_ptr<GlooLink::Transfer> GlooLink::Send(int rank, Stream stream,
                                                   std::span<const std::byte> data) {
  return Start(sent_[{rank, stream}]++, stream, data,
               [&](Tensors& tensors, int tag) { return gloo_->send(tensors, rank, tag); });
}

std::unique_ptr<GlooLink::Transfer> GlooLink::Receive(int rank, Stream stream,
                                                      std::span<std::byte> data) {
  return Start(received_[{rank, stream}]++, stream, data,
               [&](Tensors& tensors, int tag) { return gloo_->recv(tensors, rank, tag); });
}

void GlooLink::End() {
  EndGlooOperations(*gloo_);
  // Gloo does not fail a message of which a part has arrived.
  MutexLock lock(mutex_);
  ended_ = true;
  for (Message* const message : in_progress_) message->work->abort();
}

std::unique_ptr<GlooLink::Transfer> GlooLink::Start(uint32_t number, Stream stream,
                                                    std::span<const std::byte> data,
                                                    const Launch& launch) {
  auto message = std::make_unique<Message>(this);
  const uint32_t tag = kFirstTag | static_cast<uint32_t>(stream) << 29 |
                       (fingerprint_ & 0x1fffff) << 8 | (number & 0xff);
  try {
    Tensors tensors = {at::from_blob(const_cast<std::byte*>(data.data()),
                                     {static_cast<int64_t>(data.size())}, at::kByte)};
    MutexLock lock(*GlooLaunchMutex());
    message->work = launch(tensors, static_cast<int>(tag));
  } catch (const std::exception& failure) {
    message->error = absl::UnavailableError(MessageOf(failure));
    return message;
  }
  MutexLock lock(mutex_);
  if (ended_) message->work->abort();
  in_progress_.insert(message.get());
  return message;
}

}  // namespace ddp::internal
