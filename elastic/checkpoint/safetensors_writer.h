#ifndef DDP_ELASTIC_CHECKPOINT_SAFETENSORS_WRITER_H_
#define DDP_ELASTIC_CHECKPOINT_SAFETENSORS_WRITER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/content_hash.h"
#include "elastic/checkpoint/file_system.h"
#include "elastic/checkpoint/tensor_view.h"

namespace ddp::elastic {

// Where the values start in a file of ours: whole pages, so that a reader may map or read them
// directly. (The format allows any place; other writers' files are read too.)
inline constexpr uint64_t kSafetensorsAlignment = 4096;

// What was written of one tensor, and of the file.
struct WrittenTensor {
  std::string name;
  TensorType type;
  uint64_t offset = 0;  // from the start of the file
  uint64_t bytes = 0;
  ContentHash hash;
};
struct WrittenFile {
  uint64_t bytes = 0;
  ContentHash hash;
  std::vector<WrittenTensor> tensors;  // in the order of the file
};

// The start of a safetensors file that holds `tensors` in the given order: the header's length, the
// header, spaces up to kSafetensorsAlignment. A function of its arguments only. Errors:
// kInvalidArgument (two tensors of one name; more names than the format's 100 MB header takes).
absl::StatusOr<std::string> EncodeSafetensorsHeader(const std::vector<TensorView>& tensors);

// The order in which we lay tensors down: wide elements first, so that each is aligned to its
// element, then by name.
std::vector<TensorView> InFileOrder(std::vector<TensorView> tensors);

// Creates `path` with `tensors`, hashes what it writes, and syncs it. Equal tensors, in any order,
// give equal bytes. The file's name is durable only after the caller syncs the folder. Errors:
// those of EncodeSafetensorsHeader and of the file system; the file may then exist in part.
absl::StatusOr<WrittenFile> WriteSafetensors(FileSystem& file_system, const std::string& path,
                                             std::vector<TensorView> tensors);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAFETENSORS_WRITER_H_
