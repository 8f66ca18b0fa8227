#ifndef DDP_ELASTIC_CHECKPOINT_FORMAT_MANIFEST_H_
#define DDP_ELASTIC_CHECKPOINT_FORMAT_MANIFEST_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "elastic/data/elastic_sampler.h"

namespace ddp::elastic {

// The name of the file inside a checkpoint's folder.
inline constexpr char kManifestName[] = "MANIFEST.json";

// The kind, parameter groups, options and step counts of an optimizer, without its tensors.
struct OptimizerRecord {
  using Option = std::variant<bool, double, std::vector<double>>;
  struct Group {
    std::vector<std::string> parameters;  // their names in the model, in the optimizer's order
    std::map<std::string, Option> options;

    friend bool operator==(const Group&, const Group&) = default;
  };

  std::string type;  // "SGD", "Adam", "AdamW"
  std::vector<Group> groups;
  std::map<std::string, int64_t> steps;  // by parameter, where the optimizer counts them

  friend bool operator==(const OptimizerRecord&, const OptimizerRecord&) = default;
};

struct FileRecord {
  std::string name;  // inside the checkpoint's folder
  uint64_t bytes = 0;
  ContentHash hash;

  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

struct TensorRecord {
  std::string name;
  std::string file;
  TensorType type;
  uint64_t offset = 0;  // of its bytes in the file
  uint64_t bytes = 0;
  ContentHash hash;

  friend bool operator==(const TensorRecord&, const TensorRecord&) = default;
};

// The content of MANIFEST.json: everything about a checkpoint but the tensors' values, and a hash
// of every file and tensor. A checkpoint is complete ("whole" in messages) when its manifest is
// undamaged and every file matches the manifest.
//
// The last field of the file is a hash of all bytes before it, so that a change of any bit is
// found:
//   ...,
//   "manifest_xxh3_128": "<32 digits: XXH3-128 of all bytes before the comma above>"
//   }
struct Manifest {
  // The saved state.
  CheckpointId id;
  int64_t epoch = 0;
  std::optional<SamplerState> sampler;
  std::optional<OptimizerRecord> optimizer;
  std::vector<std::vector<std::string>> bucket_layout;
  std::map<std::string, std::string> aliases;  // tied tensors: other name -> name it is saved under
  std::optional<double> metric;                // by which retention compares; a finite number
  int world_size = 1;                          // of the job that saved it
  std::vector<FileRecord> files;               // by name
  std::vector<TensorRecord> tensors;           // by file, then offset
  ContentHash state_hash;                      // of the model's and optimizer's tensors

  // About the writer, not part of the state.
  std::string run_id;
  std::string generation_nonce;
  std::string torch_version;
  int64_t saved_unix_seconds = 0;

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// Returns the text of MANIFEST.json.
std::string EncodeManifest(const Manifest& manifest);

// Returns OK when ParseManifest(EncodeManifest(manifest)) equals `manifest`. Errors:
// kInvalidArgument, with the value that cannot be written: an option that is not a finite number, a
// name that is not UTF-8, or a number outside its range.
absl::Status CheckManifest(const Manifest& manifest);

// Parses the text of MANIFEST.json and trusts nothing in it. The result is consistent: plain file
// names, each once; tensors inside listed files, with sizes that match their shapes.
// Errors: kDataLoss (damaged or inconsistent), kUnimplemented (another version of the format).
absl::StatusOr<Manifest> ParseManifest(const std::string& text);

// Returns OK when the hash at the end of the text of a MANIFEST.json is that of the bytes before
// it. Error: kDataLoss.
absl::Status CheckManifestHash(const std::string& text);

// Parses as ParseManifest(), but does not check the manifest's own hash. For tools that tell what
// is damaged: any field of the result may have another value than the writer's.
absl::StatusOr<Manifest> ParseDamagedManifest(const std::string& text);

// The records of the files that one rank has written, which the rank sends to rank 0. Parsing
// trusts nothing, as ParseManifest().
struct WrittenRecords {
  std::vector<FileRecord> files;
  std::vector<TensorRecord> tensors;
};
std::string EncodeRecords(const WrittenRecords& records);
absl::StatusOr<WrittenRecords> ParseRecords(const std::string& text);

// Returns a hash over names, types and hashes of `tensors`. Their order does not matter.
ContentHash StateHash(const std::vector<TensorRecord>& tensors);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FORMAT_MANIFEST_H_
