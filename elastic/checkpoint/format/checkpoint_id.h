#ifndef DDP_ELASTIC_CHECKPOINT_FORMAT_CHECKPOINT_ID_H_
#define DDP_ELASTIC_CHECKPOINT_FORMAT_CHECKPOINT_ID_H_

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp::elastic {

// Identifies a checkpoint by its training step and the generation that saved it. IDs are ordered by
// step, then by generation. The greater ID counts as the newer checkpoint, whenever it was saved:
// clocks and file times are not used.
struct CheckpointId {
  int64_t step = 0;
  uint64_t generation = 0;

  friend auto operator<=>(const CheckpointId&, const CheckpointId&) = default;
};

// Returns "step-000000001200.g0007", with more digits where needed. A negative step fails a CHECK.
std::string FolderName(const CheckpointId& id);

// Inverts FolderName(). Returns nullopt for every other name.
std::optional<CheckpointId> ParseFolderName(const std::string& name);

// Returns the checkpoints among the names of a folder's entries, newest first.
std::vector<CheckpointId> NewestFirst(const std::vector<std::string>& names);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FORMAT_CHECKPOINT_ID_H_
