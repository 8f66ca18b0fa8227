// Messages between hosts by LibTorch's Gloo.
#ifndef DDP_COMM_HIERARCHICAL_GLOO_LINK_H_
#define DDP_COMM_HIERARCHICAL_GLOO_LINK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/hierarchical/host_link.h"

namespace ddp::internal {

inline const BackendTraits& GlooTraits() {
  static const auto* const traits = [] {
    auto* const made = new BackendTraits();
    AddGlooTraits(*made);
    return made;
  }();
  return *traits;
}

// Returns the status for an exception of LibTorch.
inline absl::Status StatusOf(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  if (absl::StrContains(text, "imed out")) return absl::DeadlineExceededError(text);
  return absl::UnavailableError(text);
}

// A link through a Gloo that carries nothing else. The tag of a message is its number and its
// stream.
//
// Threads: one at a time; End() any.
class GlooLink : public HostLink {
 public:
  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

  std::unique_ptr<Transfer> Send(int rank, Stream stream,
                                 std::span<const std::byte> data) override {
    return Start(sent_[{rank, stream}]++, stream, data,
                 [&](Tensors& tensors, int tag) { return gloo_->send(tensors, rank, tag); });
  }
  std::unique_ptr<Transfer> Receive(int rank, Stream stream, std::span<std::byte> data) override {
    return Start(received_[{rank, stream}]++, stream, data,
                 [&](Tensors& tensors, int tag) { return gloo_->recv(tensors, rank, tag); });
  }

  // Fails the messages in progress and all later ones. To be called after the end of the
  // connections: Gloo does not fail a message of which a part has arrived.
  void End() {
    MutexLock lock(mutex_);
    ended_ = true;
    for (Message* const message : in_progress_) message->work->abort();
  }

 private:
  using Tensors = std::vector<at::Tensor>;

  struct Message : Transfer {
    explicit Message(GlooLink* link) : link(link) {}
    ~Message() override {
      MutexLock lock(link->mutex_);
      link->in_progress_.erase(this);
    }
    absl::Status Wait(absl::Duration timeout) override {
      if (!work) return error;
      const auto limit = std::clamp(timeout, absl::Milliseconds(1), CondVar::kLongestWait);
      try {
        if (work->wait(absl::ToChronoMilliseconds(limit))) return absl::OkStatus();
        return Ended();
      } catch (const std::exception& failure) {
        return StatusOf(failure);
      }
    }

    GlooLink* const link;
    c10::intrusive_ptr<c10d::Work> work;  // null when the start has failed
    absl::Status error;
  };

  static absl::Status Ended() {
    return absl::UnavailableError("Connection closed: the group ends");
  }

  template <typename Launch>
  std::unique_ptr<Transfer> Start(uint32_t number, Stream stream, std::span<const std::byte> data,
                                  const Launch& launch) {
    auto message = std::make_unique<Message>(this);
    // Tags are not negative. A number comes again long after its message.
    const int tag = static_cast<int>((number << 1 | static_cast<uint32_t>(stream)) & 0x7fffffff);
    try {
      Tensors tensors = {at::from_blob(const_cast<std::byte*>(data.data()),
                                       {static_cast<int64_t>(data.size())}, at::kByte)};
      MutexLock lock(*GlooTraits().launch_mutex);
      message->work = launch(tensors, tag);
    } catch (const std::exception& failure) {
      message->error = StatusOf(failure);
      return message;
    }
    MutexLock lock(mutex_);
    if (ended_) message->work->abort();
    in_progress_.insert(message.get());
    return message;
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<std::pair<int, Stream>, uint32_t> sent_;  // messages so far, by rank
  std::map<std::pair<int, Stream>, uint32_t> received_;

  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Message*> in_progress_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_GLOO_LINK_H_
