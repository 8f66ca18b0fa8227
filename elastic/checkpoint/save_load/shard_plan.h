#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SHARD_PLAN_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SHARD_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/tensor_view.h"

namespace ddp::elastic {

// One file of a checkpoint.
struct Shard {
  std::string file;  // its name
  int rank = 0;      // its writer
  std::vector<TensorView> tensors;
};

// PlanShards() cuts the replicated state into files and assigns each file to a rank. The content
// and the name of a file depend on the tensors and `file_bytes_max` alone, so equal state gives
// equal files for any world size. Only the assignment depends on `world_size`.
//
// Rank 0 writes every file that holds a buffer, because buffers may differ between ranks. Each
// other file goes to the rank with the fewest bytes assigned so far.
struct ShardPlanInput {
  std::vector<TensorView> buffers;
  std::vector<TensorView> parameters;
  std::vector<TensorView> optimizer;
  int world_size = 1;
  uint64_t file_bytes_max = uint64_t{1} << 30;  // a larger tensor has a file of its own
};
std::vector<Shard> PlanShards(const ShardPlanInput& input);

// Returns "extra-00003.safetensors" for rank 3.
std::string ExtraFileName(int rank);

// Returns a hash of the plan's files and ranks, and of its tensors' names and types. The ranks
// compare it before a save: equal plans give one consistent checkpoint.
ContentHash PlanHash(const std::vector<Shard>& plan);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SHARD_PLAN_H_
