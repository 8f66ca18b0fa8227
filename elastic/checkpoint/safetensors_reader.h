#ifndef DDP_ELASTIC_CHECKPOINT_SAFETENSORS_READER_H_
#define DDP_ELASTIC_CHECKPOINT_SAFETENSORS_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/content_hash.h"
#include "elastic/checkpoint/file_system.h"
#include "elastic/checkpoint/tensor_view.h"

namespace ddp::elastic {

// One tensor as a file's header describes it. The bytes lie at [offset, offset + bytes) of the
// file.
struct StoredTensor {
  std::string name;
  TensorType type;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Reads the start of a safetensors file of `file_bytes` bytes. `start` is the file's beginning, at
// least its first 8 bytes and its whole header (see SafetensorsHeaderEnd). Trusts nothing: memory
// and time are bounded by the header's size whatever it says. Accepts exactly the format: each
// tensor's bytes follow its predecessor's, the last ends with the file, sizes match shapes, names
// are unique. Errors: kDataLoss, with what is wrong and where.
//
// The result is in the order of the file.
absl::StatusOr<std::vector<StoredTensor>> ParseSafetensorsHeader(const std::string& start,
                                                                 uint64_t file_bytes);

// Where the header of a file ends, from its first 8 bytes. kDataLoss when that is outside of the
// file or over the format's bound.
absl::StatusOr<uint64_t> SafetensorsHeaderEnd(const char first_bytes[8], uint64_t file_bytes);

// A safetensors file in memory. Movable; the views stay valid with it.
struct LoadedFile {
  uint64_t bytes = 0;
  ContentHash hash;                  // of the whole file
  std::vector<TensorView> tensors;   // into `data`
  std::vector<StoredTensor> stored;  // the same ones
  std::vector<ContentHash> hashes;   // the same ones, each tensor's own
  std::unique_ptr<char[]> data;
};

// Reads all of `file`, which messages call `name`. Errors: kDataLoss, kResourceExhausted (memory),
// and those of the file system.
absl::StatusOr<LoadedFile> LoadSafetensors(const ReadableFile& file, const std::string& name);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAFETENSORS_READER_H_
