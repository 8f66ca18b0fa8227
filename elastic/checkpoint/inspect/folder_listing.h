#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_FOLDER_LISTING_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_FOLDER_LISTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/checkpoint_id.h"

namespace ddp::elastic {

// One checkpoint of a folder, as its manifest and the sizes of its files show it. No tensor is
// read.
struct ListedCheckpoint {
  enum class State {
    kComplete,    // the manifest is undamaged, and each of its files is there with its size
    kIncomplete,  // the manifest or a file is missing, or a file has another size
    kDamaged,     // the manifest is damaged
    kUnreadable,  // another obstacle, such as permissions or a newer format
  };

  CheckpointId id;
  std::string folder;  // its path
  State state = State::kUnreadable;
  std::string reason;  // why the state is not kComplete; names the file

  // From the manifest; without value when the manifest could not be read.
  std::string run_id;
  int world_size = 0;
  uint64_t files = 0;
  uint64_t tensors = 0;
  uint64_t bytes = 0;  // of the files
  int64_t saved_unix_seconds = 0;
};

struct FolderListing {
  std::vector<ListedCheckpoint> checkpoints;  // newest first
  std::vector<std::string> work_folders;      // names of unfinished saves and removals, sorted
};

// Returns "complete", "incomplete", "damaged" or "unreadable".
const char* StateName(ListedCheckpoint::State state);

// Looks at one checkpoint, whose folder exists.
ListedCheckpoint LookAt(FileSystem& file_system, const std::string& folder, const CheckpointId& id);

// Lists the folder of all checkpoints of a job. Errors: those of the file system, kNotFound when
// there is no such folder.
absl::StatusOr<FolderListing> ListFolder(FileSystem& file_system, const std::string& root);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_FOLDER_LISTING_H_
