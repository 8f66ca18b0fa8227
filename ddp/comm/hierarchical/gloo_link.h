#ifndef DDP_COMM_HIERARCHICAL_GLOO_LINK_H_
#define DDP_COMM_HIERARCHICAL_GLOO_LINK_H_

#include <cstddef>
#include <cstdint>
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
#include "base/mutex.h"
#include "ddp/comm/hierarchical/host_link.h"

namespace ddp::internal {

// Messages between hosts by LibTorch's Gloo over all ranks, which also carries the program's own
// messages: send() and recv().
//
// The tag of a message is made of its stream, the collective's fingerprint, and its number among
// those of the rank and the stream. Gloo keeps the order of messages of one tag, so numbers may
// come again. They spread the messages over the network devices, where Gloo has several.
class GlooLink : public HostLink {
 public:
  // Tags of the program's messages are smaller.
  static constexpr int kFirstTag = 1 << 30;

  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> gloo);

  void Enter(uint32_t fingerprint) override { fingerprint_ = fingerprint; }
  std::unique_ptr<Transfer> Send(int rank, Stream stream, std::span<const std::byte> data) override;
  std::unique_ptr<Transfer> Receive(int rank, Stream stream, std::span<std::byte> data) override;
  void End() override;

 private:
  struct Message;
  using Tensors = std::vector<at::Tensor>;
  using Launch = std::function<c10::intrusive_ptr<c10d::Work>(Tensors& tensors, int tag)>;

  std::unique_ptr<Transfer> Start(uint32_t number, Stream stream, std::span<const std::byte> data,
                                  const Launch& launch);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  uint32_t fingerprint_ = 0;
  std::map<std::pair<int, Stream>, uint32_t> sent_;  // messages so far, by rank
  std::map<std::pair<int, Stream>, uint32_t> received_;

  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Message*> in_progress_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_GLOO_LINK_H_
