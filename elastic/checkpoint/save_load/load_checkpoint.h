#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_LOAD_CHECKPOINT_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_LOAD_CHECKPOINT_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "elastic/checkpoint/group/checkpoint_group.h"

namespace ddp::elastic {

// A checkpoint in memory. Every loaded byte matches the manifest. Owns the bytes; the views stay
// valid when it is moved.
struct LoadedCheckpoint {
  Manifest manifest;
  std::map<std::string, TensorView> model;
  std::map<std::string, TensorView> optimizer;
  std::map<std::string, TensorView> extra;  // of this rank; empty when the rank was not saved
  std::vector<LoadedFile> files;            // own the bytes
  std::vector<std::string> passed_over;     // one line for each newer checkpoint: its name and why
};

// Returns the reasons why `manifest` cannot be loaded here, one line each; empty: it can be loaded.
using FindMismatches = std::function<std::vector<std::string>(const Manifest& manifest)>;

// Retries after obstacles that may pass: a lack of descriptors, a restarted file server, a name
// that a cache does not show yet. The retries of each checkpoint are counted anew.
struct LoadOptions {
  int retries = 5;  // with a pause before each; one retry without a pause comes first
  absl::Duration first_pause = absl::Milliseconds(100);  // doubles with each retry
  std::function<void(absl::Duration)> pause = nullptr;   // null: blocks for the duration
};

// Blocks before retry number `retry`, from 0, for the pause that `options` states.
void PauseBeforeRetry(const LoadOptions& options, int retry);

// Reads the newest checkpoint. Collective over `group`: all ranks get the same checkpoint, nullopt
// (there is no checkpoint), or an error. Reads an older checkpoint only when every newer one is
// damaged for some rank, or lacks a file for every rank. `passed_over` has the reason for each.
//
// Errors:
// - kDataLoss: there are checkpoints, and each is damaged for some rank or lacks a file for all.
// - kUnavailable: the newest of the others cannot be read; names the rank and the file.
// - kFailedPrecondition: the checkpoint to load does not fit; lists all mismatches.
// - The errors of the group.
absl::StatusOr<std::optional<LoadedCheckpoint>> LoadNewestCheckpoint(
    const CheckpointStorage& storage, CheckpointGroup& group, const FindMismatches& find_mismatches,
    const LoadOptions& options = {});

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_LOAD_CHECKPOINT_H_
