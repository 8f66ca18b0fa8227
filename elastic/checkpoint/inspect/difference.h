#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_DIFFERENCE_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_DIFFERENCE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/inspect/verification.h"

namespace ddp::elastic {

// A tensor that is not the same in two checkpoints.
struct TensorDifference {
  std::string part;  // "model", "optimizer" or "extra"
  std::string name;
  std::optional<TensorType> a;  // nullopt: the first checkpoint does not have the tensor
  std::optional<TensorType> b;  // nullopt: the second one does not

  // Where both have the tensor in one type:
  uint64_t elements = 0;
  uint64_t different = 0;         // elements with other bits
  std::optional<double> largest;  // see ValueDifference::largest()

  bool compares_values() const { return a.has_value() && a == b; }
};

// A field of the manifests that is not the same: its path, such as
// "optimizer/param_groups/0/options/lr", and its values as JSON. Empty: the field is missing.
struct FieldDifference {
  std::string field;
  std::string a;
  std::string b;
};

struct CheckpointDifference {
  std::string a;  // the folders
  std::string b;
  uint64_t equal_tensors = 0;
  std::vector<TensorDifference> tensors;  // by part and name
  std::vector<FieldDifference> fields;    // of the saved state, by path

  bool is_empty() const { return tensors.empty() && fields.empty(); }
};

// Compares the states of the checkpoints in two folders: the tensors, wherever they lie in files,
// and every field of the manifest that is not about the writer or the files. Tensors whose type and
// hash are equal count as equal and are not read: verify a checkpoint to know that its hashes hold.
// Tensors of one type with other hashes are read, a piece at a time, and checked against their
// hashes.
//
// `progress` may be null. Errors: kDataLoss, with the tensor, for a damaged checkpoint; those of
// ReadManifestOf() and the file system.
absl::StatusOr<CheckpointDifference> CompareCheckpoints(FileSystem& file_system,
                                                        const std::string& a, const std::string& b,
                                                        const InspectProgress& progress = nullptr);

// Returns the fields that differ. Pure.
std::vector<FieldDifference> CompareFields(const Manifest& a, const Manifest& b);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_DIFFERENCE_H_
