#ifndef DDP_ELASTIC_CHECKPOINT_FORMAT_SAFETENSORS_WRITER_H_
#define DDP_ELASTIC_CHECKPOINT_FORMAT_SAFETENSORS_WRITER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/tensor_view.h"

namespace ddp::elastic {

// The alignment, in bytes, of the first value in a written file: a page, so that a reader may map
// or read the values directly. (The format allows any offset; the reader accepts any.)
inline constexpr uint64_t kSafetensorsAlignment = 4096;

// The place of a written tensor in its file, and its hash.
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

// Returns the start of a safetensors file that holds `tensors` in the given order: the header's
// length, the header, and spaces up to the next multiple of kSafetensorsAlignment. Depends on
// `tensors` only.
// Errors: kInvalidArgument when two tensors have one name, a name is not UTF-8, or the names exceed
// the format's header of 100 MB.
absl::StatusOr<std::string> EncodeSafetensorsHeader(const std::vector<TensorView>& tensors);

// Returns `tensors` in the order in which WriteSafetensors() writes them: by descending element
// size, so that each tensor is aligned to its elements, then by name.
std::vector<TensorView> InFileOrder(std::vector<TensorView> tensors);

// Creates the file `path` with `tensors`, hashes the written bytes, and syncs the file. Equal
// tensors, in any order, give equal bytes. The file's name is durable only after the caller syncs
// the folder. Errors: those of EncodeSafetensorsHeader() and of the file system. After an error the
// file may exist in part.
absl::StatusOr<WrittenFile> WriteSafetensors(FileSystem& file_system, const std::string& path,
                                             std::vector<TensorView> tensors);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FORMAT_SAFETENSORS_WRITER_H_
