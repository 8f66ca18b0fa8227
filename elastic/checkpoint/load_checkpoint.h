#ifndef DDP_ELASTIC_CHECKPOINT_LOAD_CHECKPOINT_H_
#define DDP_ELASTIC_CHECKPOINT_LOAD_CHECKPOINT_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/checkpoint/checkpoint_group.h"
#include "elastic/checkpoint/checkpoint_storage.h"
#include "elastic/checkpoint/manifest.h"
#include "elastic/checkpoint/tensor_view.h"

namespace ddp::elastic {

// A checkpoint in memory, every byte of it compared with its manifest. Movable; the views stay
// valid.
struct LoadedCheckpoint {
  Manifest manifest;
  std::map<std::string, TensorView> model;
  std::map<std::string, TensorView> optimizer;
  std::map<std::string, TensorView> extra;  // this rank's; none where it was not saved
  std::vector<LoadedFile> files;            // own the bytes
  std::vector<std::string> passed_over;     // every newer checkpoint, and why
};

// What keeps `manifest` from being loaded here, one line each; none: nothing does.
using FindMismatches = std::function<std::vector<std::string>(const Manifest& manifest)>;

// How often obstacles that may pass are looked at again: descriptors that ran out, a file server
// that was restarted, a name that a cache does not show yet.
struct LoadOptions {
  int retries = 5;
  absl::Duration first_pause = absl::Milliseconds(100);  // doubles from time to time
  std::function<void(absl::Duration)> pause = nullptr;   // null: waits
};

// Reads the newest checkpoint. An older one is taken only when every newer one is damaged for some
// rank, or has a file that is missing to every rank. `passed_over` says so for each.
//
// Every rank of `group` calls it; all get the same one, or nothing (there is no checkpoint), or an
// error: kDataLoss (there are some and all are damaged), kUnavailable (the newest cannot be read,
// for another reason: the message names the rank and the file), kFailedPrecondition (the one to
// load does not fit: all mismatches), those of the group.
absl::StatusOr<std::optional<LoadedCheckpoint>> LoadNewestCheckpoint(
    const CheckpointStorage& storage, CheckpointGroup& group, const FindMismatches& find_mismatches,
    const LoadOptions& options = {});

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_LOAD_CHECKPOINT_H_
