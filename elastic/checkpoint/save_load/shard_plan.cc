#include "elastic/checkpoint/save_load/shard_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

struct Piece {
  std::vector<TensorView> tensors;
  uint64_t bytes = 0;
  bool for_rank_zero = false;
};

void AddTo(std::vector<Piece>& pieces, const std::vector<TensorView>& tensors, bool for_rank_zero,
           uint64_t bytes_max) {
  for (const TensorView& tensor : tensors) {
    const bool fits = !pieces.empty() && pieces.back().bytes <= bytes_max &&
                      tensor.bytes <= bytes_max - pieces.back().bytes;
    if (!fits) pieces.emplace_back();
    pieces.back().tensors.push_back(tensor);
    pieces.back().bytes += tensor.bytes;
    pieces.back().for_rank_zero |= for_rank_zero;
  }
}

void Deal(std::vector<Piece> pieces, const std::string& kind, std::vector<uint64_t>& load,
          std::vector<Shard>& shards) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    Shard shard;
    shard.file = absl::StrFormat("%s-%05d-of-%05d.safetensors", kind, i + 1, pieces.size());
    if (!pieces[i].for_rank_zero) {
      shard.rank = static_cast<int>(std::min_element(load.begin(), load.end()) - load.begin());
    }
    load[static_cast<size_t>(shard.rank)] += pieces[i].bytes;
    shard.tensors = std::move(pieces[i].tensors);
    shards.push_back(std::move(shard));
  }
}

}  // namespace

std::vector<Shard> PlanShards(const ShardPlanInput& input) {
  CHECK_GE(input.world_size, 1);
  std::vector<Piece> model;
  AddTo(model, input.buffers, /*for_rank_zero=*/true, input.file_bytes_max);
  AddTo(model, input.parameters, /*for_rank_zero=*/false, input.file_bytes_max);
  if (model.empty()) model.emplace_back();  // a model without tensors is still a model
  std::vector<Piece> optimizer;
  AddTo(optimizer, input.optimizer, /*for_rank_zero=*/false, input.file_bytes_max);
  std::vector<Shard> shards;
  std::vector<uint64_t> load(static_cast<size_t>(input.world_size), 0);
  Deal(std::move(model), "model", load, shards);
  Deal(std::move(optimizer), "optimizer", load, shards);
  return shards;
}

std::string ExtraFileName(int rank) { return absl::StrFormat("extra-%05d.safetensors", rank); }

ContentHash PlanHash(const std::vector<Shard>& plan) {
  ContentHasher hasher;
  for (const Shard& shard : plan) {
    std::string text = absl::StrCat(shard.file, " ", shard.rank, "\n");
    for (const TensorView& tensor : shard.tensors) {
      absl::StrAppend(&text, tensor.name.size(), " ", tensor.name, " ", TensorTypeText(tensor.type),
                      "\n");
    }
    hasher.Update(text.data(), text.size());
  }
  return hasher.Digest();
}

}  // namespace ddp::elastic
