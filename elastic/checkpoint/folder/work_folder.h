#ifndef DDP_ELASTIC_CHECKPOINT_FOLDER_WORK_FOLDER_H_
#define DDP_ELASTIC_CHECKPOINT_FOLDER_WORK_FOLDER_H_

#include <optional>
#include <string>

#include "elastic/checkpoint/format/checkpoint_id.h"

namespace ddp::elastic {

// Builds and parses the names of the files and folders that a save creates and removes. A save
// removes entries with these names and the claims of OwnerFile, and no other entry.

// A folder in the root that is not a checkpoint: a save writes into it, or a process removes it.
struct WorkFolder {
  CheckpointId id;
  std::string nonce;     // of the writer; "not-whole": a damaged checkpoint that is being removed
  bool retired = false;  // true: being removed, no process writes into it

  friend bool operator==(const WorkFolder&, const WorkFolder&) = default;
};

// Returns ".tmp-step-000000001200.g0007.<nonce>", or ".del-..." when `retired`.
std::string WorkFolderName(const WorkFolder& folder);

// Inverts WorkFolderName(). Returns nullopt for every other name.
std::optional<WorkFolder> ParseWorkFolderName(const std::string& name);

// Returns true when `name` begins with ".tmp-" or ".del-".
bool LooksLikeWorkFolder(const std::string& name);

// Returns true for 1 to 100 letters, digits and "-". Nonces become parts of file names.
bool IsPlainNonce(const std::string& nonce);

// Returns true for the names of files that a save writes into a checkpoint's folder:
// MANIFEST.json, model-00001-of-00002.safetensors, optimizer-00001-of-00002.safetensors,
// extra-00003.safetensors.
bool IsCheckpointFile(const std::string& name);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FOLDER_WORK_FOLDER_H_
