// Messages between hosts by LibTorch's Gloo.
#ifndef DDP_COMM_HIERARCHICAL_GLOO_LINK_H_
#define DDP_COMM_HIERARCHICAL_GLOO_LINK_H_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/hierarchical/host_link.h"

namespace ddp::internal {

const BackendTraits& GlooTraits();

// Returns the status for an exception of LibTorch.
absl::Status StatusOf(const std::exception& error);

// A link through a Gloo that carries nothing else. The tag of a message is its number and its
// stream.
//
// Threads: one at a time; End() any.
class GlooLink : public HostLink {
 public:
  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> gloo);

  std::unique_ptr<Transfer> Send(int rank, Stream stream, std::span<const std::byte> data) override;
  std::unique_ptr<Transfer> Receive(int rank, Stream stream, std::span<std::byte> data) override;

  // Fails the messages in progress and all later ones. To be called after the end of the
  // connections: Gloo does not fail a message of which a part has arrived.
  void End();

 private:
  struct Message;
  using Tensors = std::vector<at::Tensor>;
  using Launch = std::function<c10::intrusive_ptr<c10d::Work>(Tensors& tensors, int tag)>;

  std::unique_ptr<Transfer> Start(uint32_t number, Stream stream, std::span<const std::byte> data,
                                  const Launch& launch);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<std::pair<int, Stream>, uint32_t> sent_;  // messages so far, by rank
  std::map<std::pair<int, Stream>, uint32_t> received_;

  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Message*> in_progress_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_GLOO_LINK_H_
