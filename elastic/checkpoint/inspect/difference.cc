#include "elastic/checkpoint/inspect/difference.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/inspect/stored_checkpoint.h"
#include "elastic/checkpoint/inspect/value_difference.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using nlohmann::json;

constexpr uint64_t kPieceBytes = uint64_t{1} << 20;  // a multiple of every element's size

// Part and name. In one part each tensor has one name.
using Key = std::pair<std::string, std::string>;
using Tensors = std::map<Key, const TensorRecord*>;

Tensors TensorsOf(const Manifest& manifest) {
  Tensors tensors;
  for (const TensorRecord& tensor : manifest.tensors) {
    tensors[{PartOf(tensor.file), tensor.name}] = &tensor;
  }
  return tensors;
}

// Reads one tensor piece by piece, and checks its hash at the end.
class TensorReader {
 public:
  static absl::StatusOr<TensorReader> Open(FileSystem& file_system, const std::string& folder,
                                           const TensorRecord& tensor) {
    std::string path = absl::StrCat(folder, "/", tensor.file);
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, file_system.OpenFile(path));
    return TensorReader(std::move(path), std::move(file), tensor);
  }

  absl::Status Next(uint64_t bytes) {
    piece_.resize(bytes);
    DDP_RETURN_IF_ERROR(file_->Read(tensor_->offset + done_, piece_.data(), bytes));
    hasher_.Update(piece_.data(), bytes);
    done_ += bytes;
    return absl::OkStatus();
  }

  const char* piece() const { return piece_.data(); }

  absl::Status Check() const {
    if (hasher_.Digest() == tensor_->hash) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(path_, ": tensor ", tensor_->name, " is damaged"));
  }

 private:
  TensorReader(std::string path, std::unique_ptr<ReadableFile> file, const TensorRecord& tensor)
      : path_(std::move(path)), file_(std::move(file)), tensor_(&tensor) {}

  std::string path_;
  std::unique_ptr<ReadableFile> file_;
  const TensorRecord* tensor_;
  ContentHasher hasher_;
  std::string piece_;
  uint64_t done_ = 0;
};

// One side of a comparison.
struct Side {
  const std::string& folder;
  const TensorRecord& tensor;
};

absl::Status CompareValues(FileSystem& file_system, const Side& a, const Side& b,
                           const std::function<void(uint64_t)>& on_bytes,
                           TensorDifference& difference) {
  DDP_ASSIGN_OR_RETURN(TensorReader reader_a, TensorReader::Open(file_system, a.folder, a.tensor));
  DDP_ASSIGN_OR_RETURN(TensorReader reader_b, TensorReader::Open(file_system, b.folder, b.tensor));
  ValueDifference values(a.tensor.type.dtype);
  for (uint64_t at = 0; at < a.tensor.bytes;) {
    const uint64_t bytes = std::min(a.tensor.bytes - at, kPieceBytes);
    DDP_RETURN_IF_ERROR(reader_a.Next(bytes));
    DDP_RETURN_IF_ERROR(reader_b.Next(bytes));
    values.Add(reader_a.piece(), reader_b.piece(), bytes);
    on_bytes(2 * bytes);
    at += bytes;
  }
  DDP_RETURN_IF_ERROR(reader_a.Check());
  DDP_RETURN_IF_ERROR(reader_b.Check());
  difference.elements = a.tensor.bytes / DtypeBytes(a.tensor.type.dtype);
  difference.different = values.different();
  difference.largest = values.largest();
  return absl::OkStatus();
}

uint64_t BytesToCompare(const Tensors& a, const Tensors& b) {
  uint64_t bytes = 0;
  for (const auto& [key, tensor] : a) {
    const auto other = b.find(key);
    if (other == b.end() || other->second->type != tensor->type) continue;
    if (other->second->hash != tensor->hash) bytes += 2 * tensor->bytes;
  }
  return bytes;
}

// Returns the fields of the saved state, by path.
std::map<std::string, std::string> FieldsOf(const Manifest& manifest) {
  json root = json::parse(EncodeManifest(manifest));
  // About the writer, the files, or compared as tensors.
  for (const char* name :
       {"format_version", "generation", "generation_nonce", "run_id", "torch_version",
        "saved_unix_seconds", "state_xxh3_128", "files", "tensors", "manifest_xxh3_128"}) {
    root.erase(name);
  }
  std::map<std::string, std::string> fields;
  const json flat = root.flatten();
  for (const auto& [path, value] : flat.items()) {
    fields[path.substr(1)] = value.dump();
  }
  return fields;
}

}  // namespace

std::vector<FieldDifference> CompareFields(const Manifest& a, const Manifest& b) {
  const std::map<std::string, std::string> fields_a = FieldsOf(a);
  const std::map<std::string, std::string> fields_b = FieldsOf(b);
  std::map<std::string, FieldDifference> all;
  for (const auto& [field, value] : fields_a) all[field].a = value;
  for (const auto& [field, value] : fields_b) all[field].b = value;
  std::vector<FieldDifference> differences;
  for (auto& [field, difference] : all) {
    if (difference.a == difference.b) continue;
    difference.field = field;
    differences.push_back(std::move(difference));
  }
  return differences;
}

absl::StatusOr<CheckpointDifference> CompareCheckpoints(FileSystem& file_system,
                                                        const std::string& a, const std::string& b,
                                                        const InspectProgress& progress) {
  DDP_ASSIGN_OR_RETURN(const Manifest manifest_a, ReadManifestOf(file_system, a));
  DDP_ASSIGN_OR_RETURN(const Manifest manifest_b, ReadManifestOf(file_system, b));
  const Tensors tensors_a = TensorsOf(manifest_a);
  const Tensors tensors_b = TensorsOf(manifest_b);
  CheckpointDifference difference{.a = a, .b = b};
  difference.fields = CompareFields(manifest_a, manifest_b);
  const uint64_t total = BytesToCompare(tensors_a, tensors_b);
  uint64_t done = 0;
  const auto on_bytes = [&](uint64_t bytes) {
    done += bytes;
    if (progress != nullptr) progress(done, total);
  };
  std::set<Key> keys;
  for (const auto& [key, tensor] : tensors_a) keys.insert(key);
  for (const auto& [key, tensor] : tensors_b) keys.insert(key);
  for (const Key& key : keys) {
    const auto in_a = tensors_a.find(key);
    const auto in_b = tensors_b.find(key);
    TensorDifference tensor{.part = key.first, .name = key.second};
    if (in_a != tensors_a.end()) tensor.a = in_a->second->type;
    if (in_b != tensors_b.end()) tensor.b = in_b->second->type;
    if (tensor.compares_values()) {
      if (in_a->second->hash == in_b->second->hash) {
        ++difference.equal_tensors;
        continue;
      }
      DDP_RETURN_IF_ERROR(
          CompareValues(file_system, {a, *in_a->second}, {b, *in_b->second}, on_bytes, tensor));
    }
    difference.tensors.push_back(std::move(tensor));
  }
  return difference;
}

}  // namespace ddp::elastic
