#ifndef DDP_ELASTIC_CHECKPOINT_LOAD_CHECKPOINT_H_
#define DDP_ELASTIC_CHECKPOINT_LOAD_CHECKPOINT_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
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
  std::vector<std::string> passed_over;  // newer checkpoints that not all ranks can read, and why
};

// What keeps `manifest` from being loaded here, one line each; none: nothing does.
using FindMismatches = std::function<std::vector<std::string>(const Manifest& manifest)>;

// Reads the newest checkpoint that every rank of `group` can read in full. Every rank calls it; all
// get the same one, or nothing (there is no checkpoint), or an error: kDataLoss (there are some and
// none can be read), kFailedPrecondition (the one to load does not fit: all mismatches), those of
// the group.
absl::StatusOr<std::optional<LoadedCheckpoint>> LoadNewestCheckpoint(
    const CheckpointStorage& storage, CheckpointGroup& group,
    const FindMismatches& find_mismatches);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_LOAD_CHECKPOINT_H_
