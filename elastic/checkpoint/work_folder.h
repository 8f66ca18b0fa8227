#ifndef DDP_ELASTIC_CHECKPOINT_WORK_FOLDER_H_
#define DDP_ELASTIC_CHECKPOINT_WORK_FOLDER_H_

#include <optional>
#include <string>

#include "elastic/checkpoint/checkpoint_id.h"

namespace ddp::elastic {

// The names that a save of this format gives to what it makes and removes. Nothing is ever removed
// from a folder of checkpoints under another name.

// A folder that is no checkpoint: a save writes into it, or a process removes it.
struct WorkFolder {
  CheckpointId id;
  std::string nonce;     // of the generation that made it; see IsPlainNonce
  bool retired = false;  // it is being removed: nobody writes into it

  friend bool operator==(const WorkFolder&, const WorkFolder&) = default;
};

// ".tmp-step-000000001200.g0007.<nonce>", or ".del-..." where `retired`.
std::string WorkFolderName(const WorkFolder& folder);

// The inverse: nothing for every other name.
std::optional<WorkFolder> ParseWorkFolderName(const std::string& name);

// Whether `name` begins as the name of a WorkFolder does.
bool LooksLikeWorkFolder(const std::string& name);

// 1 to 100 letters, digits and "-": nonces become parts of file names.
bool IsPlainNonce(const std::string& nonce);

// Whether a save of this format writes files of this name into a checkpoint's folder:
// MANIFEST.json, model-00001-of-00002.safetensors, optimizer-00001-of-00002.safetensors,
// extra-00003.safetensors.
bool IsCheckpointFile(const std::string& name);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_WORK_FOLDER_H_
