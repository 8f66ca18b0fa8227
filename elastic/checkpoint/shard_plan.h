#ifndef DDP_ELASTIC_CHECKPOINT_SHARD_PLAN_H_
#define DDP_ELASTIC_CHECKPOINT_SHARD_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "elastic/checkpoint/content_hash.h"
#include "elastic/checkpoint/tensor_view.h"

namespace ddp::elastic {

// One file of a checkpoint, with what goes into it and who writes it.
struct Shard {
  std::string file;
  int rank = 0;
  std::vector<TensorView> tensors;
};

// Cuts the replicated state into files and deals them to the ranks. Which tensors share a file and
// what it is called depends on the tensors alone, so that equal state gives equal files in any
// world; only the dealing depends on `world_size`.
//
// `buffers` are the model's buffers, which ranks need not have in common: rank 0 writes the files
// that hold one. The others go to whoever has the least to write.
struct ShardPlanInput {
  std::vector<TensorView> buffers;
  std::vector<TensorView> parameters;
  std::vector<TensorView> optimizer;
  int world_size = 1;
  uint64_t file_bytes_max = uint64_t{1} << 30;  // a larger tensor has a file of its own
};
std::vector<Shard> PlanShards(const ShardPlanInput& input);

// "extra-00003.safetensors"
std::string ExtraFileName(int rank);

// Equal on ranks that will write one consistent checkpoint.
ContentHash PlanHash(const std::vector<Shard>& plan);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SHARD_PLAN_H_
