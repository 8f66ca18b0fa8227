#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_VERIFICATION_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_VERIFICATION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"

namespace ddp::elastic {

// One damage of a checkpoint.
struct Damage {
  std::string file;     // its name: "MANIFEST.json" or a file of tensors
  std::string place;    // "tensor fc1.weight", "header", "field step"; empty: the file as a whole
  std::string message;  // what is wrong
};

// What a reading of every byte of a checkpoint has found.
struct Verification {
  std::string folder;
  uint64_t files = 0;    // that the manifest lists
  uint64_t tensors = 0;  // likewise
  uint64_t bytes = 0;    // that were read and hashed
  std::vector<Damage> damages;

  bool is_whole() const { return damages.empty(); }
};

// Reports how many bytes of how many are done. Called after each piece of at most 1 MiB.
using InspectProgress = std::function<void(uint64_t done, uint64_t total)>;

// Reads and hashes every tensor of the checkpoint in `folder`, and names each one that is damaged.
// A damage does not hide another: with a damaged header the tensors are found by the manifest, and
// with a damaged manifest by what can still be read of it. A manifest that does not match its own
// hash is compared with the files, so that a damaged field is named where possible.
//
// Reads each byte once, except of overlapping tensors. Memory: the manifest, one header and 1 MiB.
// `progress` may be null. Errors: those of the file system for `folder` itself; kUnimplemented for
// a newer format. What is wrong with a file, reading errors included, is a Damage.
absl::StatusOr<Verification> VerifyCheckpoint(FileSystem& file_system, const std::string& folder,
                                              const InspectProgress& progress = nullptr);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_VERIFICATION_H_
