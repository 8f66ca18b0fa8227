#ifndef DDP_ELASTIC_CHECKPOINT_FORMAT_SAFETENSORS_READER_H_
#define DDP_ELASTIC_CHECKPOINT_FORMAT_SAFETENSORS_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/tensor_view.h"

namespace ddp::elastic {

// A tensor as a file's header describes it. Its values are bytes [offset, offset + bytes) of the
// file.
struct StoredTensor {
  std::string name;
  TensorType type;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Parses the header of a safetensors file of `file_bytes` bytes, and returns its tensors in the
// order of the file. `start`: the beginning of the file, with at least the whole header (see
// SafetensorsHeaderEnd).
//
// Trusts nothing: the header's size bounds memory and time. Accepts exactly the format: each
// tensor's bytes follow its predecessor's, the last tensor ends with the file, sizes match shapes,
// and names are unique. Errors: kDataLoss, with the fault and its place.
absl::StatusOr<std::vector<StoredTensor>> ParseSafetensorsHeader(const std::string& start,
                                                                 uint64_t file_bytes);

// Returns the end of a file's header, in bytes from the file's start. `first_bytes`: of the file.
// Errors: kDataLoss when the end is outside of the file or over the format's bound.
absl::StatusOr<uint64_t> SafetensorsHeaderEnd(const char first_bytes[8], uint64_t file_bytes);

// A safetensors file in memory. Owns the bytes; the views stay valid when it is moved. Entry i of
// `tensors`, `stored` and `hashes` is about the same tensor.
struct LoadedFile {
  uint64_t bytes = 0;
  ContentHash hash;                  // of the whole file
  std::vector<TensorView> tensors;   // views into `data`
  std::vector<StoredTensor> stored;  // places in the file
  std::vector<ContentHash> hashes;   // of each tensor's bytes
  std::unique_ptr<char[]> data;
};

// Reads all of `file`. `name`: of the file, for messages. Errors: kDataLoss, kResourceExhausted
// (memory), and those of the file system.
absl::StatusOr<LoadedFile> LoadSafetensors(const ReadableFile& file, const std::string& name);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FORMAT_SAFETENSORS_READER_H_
