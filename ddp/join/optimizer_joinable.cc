#include "ddp/join/optimizer_joinable.h"

#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

std::string StateOf(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

void Load(const std::string& state, at::Device device, torch::optim::Optimizer& optimizer) {
  std::istringstream stream(state);
  torch::serialize::InputArchive archive;
  archive.load_from(stream, device);
  optimizer.load(archive);
}

// Replaces `text` by that of `root` on every rank. Collective.
void Broadcast(ProcessGroup& group, int root, std::string& text) {
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(group.device());
  group.broadcast(size, root);
  text.resize(group.to_host(size).item<int64_t>());
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr<uint8_t>(), text.data(), text.size());
  bytes = bytes.to(group.device());
  group.broadcast(bytes, root);
  bytes = group.to_host(bytes);
  std::memcpy(text.data(), bytes.const_data_ptr<uint8_t>(), text.size());
}

class Hook : public JoinHook {
 public:
  Hook(torch::optim::Optimizer* optimizer, Join* const* join)
      : optimizer_(optimizer), join_(join) {}

  void post_hook(bool is_last_joiner, int last_joiner) override {
    ProcessGroup& group = *(*join_)->process_group();
    if (group.size() == 1) return;
    std::string state;
    if (is_last_joiner) state = StateOf(*optimizer_);
    Broadcast(group, last_joiner, state);
    if (!is_last_joiner) Load(state, group.device(), *optimizer_);
  }

 private:
  torch::optim::Optimizer* const optimizer_;
  Join* const* const join_;  // set when the Join has begun
};

class OptimizerJoinable : public Joinable {
 public:
  explicit OptimizerJoinable(torch::optim::Optimizer* optimizer) : optimizer_(optimizer) {}

  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    return std::make_unique<Hook>(optimizer_, &join_);
  }
  std::shared_ptr<ProcessGroup> join_process_group() override { return nullptr; }
  void enter_join(Join* join) override { join_ = join; }
  void leave_join() override { join_ = nullptr; }

 private:
  torch::optim::Optimizer* const optimizer_;
  Join* join_ = nullptr;
};

}  // namespace

std::shared_ptr<Joinable> MakeOptimizerJoinable(torch::optim::Optimizer* optimizer) {
  return std::make_shared<OptimizerJoinable>(optimizer);
}

}  // namespace ddp::internal
