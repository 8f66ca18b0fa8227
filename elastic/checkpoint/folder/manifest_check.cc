#include "elastic/checkpoint/folder/manifest_check.h"

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

// Checks that the file has the tensors that the manifest lists for it, and no others.
absl::Status CompareTensors(const Manifest& manifest, const std::string& file,
                            const LoadedFile& loaded) {
  std::map<std::string, size_t> stored;
  for (size_t i = 0; i < loaded.stored.size(); ++i) stored[loaded.stored[i].name] = i;
  for (const TensorRecord& tensor : manifest.tensors) {
    if (tensor.file != file) continue;
    const auto found = stored.find(tensor.name);
    if (found == stored.end()) {
      return absl::DataLossError(absl::StrCat("tensor ", tensor.name, " is not in the file"));
    }
    const StoredTensor& other = loaded.stored[found->second];
    if (other.type != tensor.type || other.offset != tensor.offset) {
      return absl::DataLossError(
          absl::StrCat("tensor ", tensor.name, " is another one than the manifest says"));
    }
    const ContentHash& hash = loaded.hashes[found->second];
    if (hash != tensor.hash) {
      return absl::DataLossError(absl::StrCat("tensor ", tensor.name,
                                              " is damaged: its XXH3-128 is ", hash.Hex(),
                                              ", the manifest says ", tensor.hash.Hex()));
    }
    stored.erase(found);
  }
  if (stored.empty()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("tensor ", stored.begin()->first, " is not in the manifest"));
}

}  // namespace

absl::Status CompareFile(const Manifest& manifest, const FileRecord& record,
                         const LoadedFile& loaded) {
  DDP_RETURN_IF_ERROR(CompareTensors(manifest, record.name, loaded));
  if (loaded.hash == record.hash) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the header is damaged: the file's XXH3-128 is ",
                                          loaded.hash.Hex(), ", the manifest says ",
                                          record.hash.Hex()));
}

bool HoldsTheSame(const Manifest& a, const Manifest& b) {
  // The tensors of all files: the model's, the optimizer's and each rank's generators.
  return a.tensors == b.tensors && a.sampler == b.sampler && a.epoch == b.epoch &&
         a.optimizer == b.optimizer && a.world_size == b.world_size && a.aliases == b.aliases &&
         a.bucket_layout == b.bucket_layout;
}

}  // namespace ddp::elastic
