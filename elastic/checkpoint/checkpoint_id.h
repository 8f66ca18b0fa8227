#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINT_ID_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINT_ID_H_

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp::elastic {

// Which checkpoint: how far the training was, and the generation that saved it. The greater is the
// newer; clocks and file times play no part.
struct CheckpointId {
  int64_t step = 0;
  uint64_t generation = 0;

  friend auto operator<=>(const CheckpointId&, const CheckpointId&) = default;
};

// "step-000000001200.g0007"; more digits where they are needed. `step` >= 0.
std::string FolderName(const CheckpointId& id);

// The inverse: nothing for every other name.
std::optional<CheckpointId> ParseFolderName(const std::string& name);

// The checkpoints among the names of a folder, newest first.
std::vector<CheckpointId> NewestFirst(const std::vector<std::string>& names);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINT_ID_H_
