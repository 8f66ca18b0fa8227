#include "elastic/checkpoint/inspect/verification.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/safetensors_reader.h"
#include "elastic/checkpoint/inspect/stored_checkpoint.h"

namespace ddp::elastic {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
constexpr size_t kLengthBytes = 8;

std::string HashText(const ContentHash& found, const ContentHash& expected) {
  return absl::StrCat("its XXH3-128 is ", found.Hex(), ", the manifest says ", expected.Hex());
}

// Collects the damages and the progress of one checkpoint.
class Report {
 public:
  Report(Verification* verification, uint64_t total, const InspectProgress* progress)
      : verification_(verification), total_(total), progress_(progress) {}

  void Add(const std::string& file, std::string place, std::string message) {
    verification_->damages.push_back({file, std::move(place), std::move(message)});
  }
  size_t damages() const { return verification_->damages.size(); }

  // Turns the damages from number `first` on into damages of the manifest.
  void BlameManifest(size_t first) {
    for (size_t i = first; i < damages(); ++i) {
      Damage& damage = verification_->damages[i];
      damage.message =
          absl::StrCat("wrong about ", damage.file, ", which is undamaged: ", damage.message);
      damage.file = kManifestName;
    }
  }

  void Done(uint64_t bytes) {
    verification_->bytes += bytes;
    if (*progress_ != nullptr) (*progress_)(std::min(verification_->bytes, total_), total_);
  }

 private:
  Verification* const verification_;
  const uint64_t total_;
  const InspectProgress* const progress_;
};

// Verifies one file.
class FileVerifier {
 public:
  FileVerifier(const ReadableFile& file, const FileRecord& record, Report& report)
      : file_(file),
        record_(record),
        report_(report),
        buffer_(std::min(kPieceBytes, file.size()), '\0') {}

  // `tensors`: the file's, by offset.
  void Run(const std::vector<const TensorRecord*>& tensors) {
    const size_t before = report_.damages();
    const bool has_size = file_.size() == record_.bytes;
    if (!has_size) {
      report_.Add(record_.name, "",
                  absl::StrCat("has ", file_.size(), " bytes, the manifest says ", record_.bytes));
    }
    CheckHeader(tensors);
    uint64_t end = 0;  // of the bytes that the file's hash has
    for (const TensorRecord* tensor : tensors) {
      if (tensor->offset > end) end = HashGap(end, tensor->offset);
      end = CheckTensor(*tensor, end);
    }
    HashGap(end, file_.size());
    if (!all_read_) return;
    const ContentHash hash = file_hasher_.Digest();
    if (hash == record_.hash) {
      // The file is as it was written, so the manifest's fields about it are damaged.
      report_.BlameManifest(before);
    } else if (report_.damages() == before) {
      // Every tensor is as the manifest says: the difference is elsewhere.
      report_.Add(record_.name, "header", HashText(hash, record_.hash));
    }
  }

 private:
  // Reads [begin, end) of the file piece by piece for the given hashers. Returns the first error.
  absl::Status Hash(uint64_t begin, uint64_t end, std::vector<ContentHasher*> hashers) {
    for (uint64_t at = begin; at < end;) {
      const size_t count = static_cast<size_t>(std::min(end - at, kPieceBytes));
      DDP_RETURN_IF_ERROR(file_.Read(at, buffer_.data(), count));
      for (ContentHasher* hasher : hashers) hasher->Update(buffer_.data(), count);
      report_.Done(count);
      at += count;
    }
    return absl::OkStatus();
  }

  // Returns `end`, or the end of the file when that comes before.
  uint64_t HashGap(uint64_t begin, uint64_t end) {
    end = std::min(end, file_.size());
    if (begin >= end) return begin;
    const absl::Status read = Hash(begin, end, {&file_hasher_});
    if (!read.ok()) {
      all_read_ = false;
      report_.Add(record_.name, "", std::string(read.message()));
    }
    return end;
  }

  // Returns the end of the tensor's bytes in the file.
  uint64_t CheckTensor(const TensorRecord& tensor, uint64_t hashed_end) {
    const std::string place = absl::StrCat("tensor ", tensor.name);
    const uint64_t end = tensor.offset + tensor.bytes;
    if (end > file_.size()) {
      report_.Add(record_.name, place,
                  absl::StrCat("its ", tensor.bytes, " bytes from byte ", tensor.offset,
                               " on are not all in the file"));
      return hashed_end;
    }
    ContentHasher hasher;
    std::vector<ContentHasher*> hashers = {&hasher};
    // Tensors overlap only in a damaged manifest. The file's hash takes each byte once.
    const bool overlaps = tensor.offset < hashed_end;
    if (!overlaps) hashers.push_back(&file_hasher_);
    const absl::Status read = Hash(tensor.offset, end, hashers);
    if (!read.ok()) {
      all_read_ = false;
      report_.Add(record_.name, place, std::string(read.message()));
    } else if (const ContentHash hash = hasher.Digest(); hash != tensor.hash) {
      report_.Add(record_.name, place, HashText(hash, tensor.hash));
    }
    return overlaps ? hashed_end : end;
  }

  absl::StatusOr<std::vector<StoredTensor>> ReadHeader() const {
    char length[kLengthBytes];
    if (file_.size() < kLengthBytes) return absl::DataLossError("the file has no header");
    DDP_RETURN_IF_ERROR(file_.Read(0, length, kLengthBytes));
    DDP_ASSIGN_OR_RETURN(const uint64_t end, SafetensorsHeaderEnd(length, file_.size()));
    std::string start(end, '\0');
    DDP_RETURN_IF_ERROR(file_.Read(0, start.data(), start.size()));
    return ParseSafetensorsHeader(start, file_.size());
  }

  // Compares the file's own header with the manifest.
  void CheckHeader(const std::vector<const TensorRecord*>& tensors) {
    const absl::StatusOr<std::vector<StoredTensor>> stored = ReadHeader();
    if (!stored.ok()) {
      report_.Add(record_.name, "header", std::string(stored.status().message()));
      return;
    }
    std::map<std::string, const StoredTensor*> by_name;
    for (const StoredTensor& tensor : *stored) by_name[tensor.name] = &tensor;
    for (const TensorRecord* tensor : tensors) {
      const auto found = by_name.find(tensor->name);
      const std::string place = absl::StrCat("tensor ", tensor->name);
      if (found == by_name.end()) {
        report_.Add(record_.name, place, "it is not in the file's header");
        continue;
      }
      if (found->second->type != tensor->type) {
        report_.Add(record_.name, place,
                    absl::StrCat("it is ", TensorTypeText(found->second->type),
                                 " in the file's header, the manifest says ",
                                 TensorTypeText(tensor->type)));
      } else if (found->second->offset != tensor->offset) {
        report_.Add(record_.name, place,
                    absl::StrCat("it begins at byte ", found->second->offset,
                                 " by the file's header, at ", tensor->offset, " by the manifest"));
      }
      by_name.erase(found);
    }
    for (const auto& [name, tensor] : by_name) {
      report_.Add(record_.name, absl::StrCat("tensor ", name), "it is not in the manifest");
    }
  }

  const ReadableFile& file_;
  const FileRecord& record_;
  Report& report_;
  ContentHasher file_hasher_;
  bool all_read_ = true;
  std::string buffer_;
};

// Compares the fields of a manifest with each other and with the folder's name.
void CheckFields(const Manifest& manifest, const std::string& folder, Report& report) {
  const std::optional<CheckpointId> id = ParseFolderName(BaseName(folder));
  if (id.has_value() && id->step != manifest.id.step) {
    report.Add(kManifestName, "field step",
               absl::StrCat("it is ", manifest.id.step, ", the folder is of step ", id->step));
  }
  if (id.has_value() && id->generation != manifest.id.generation) {
    report.Add(kManifestName, "field generation",
               absl::StrCat("it is ", manifest.id.generation, ", the folder is of generation ",
                            id->generation));
  }
  std::vector<TensorRecord> state;
  std::copy_if(manifest.tensors.begin(), manifest.tensors.end(), std::back_inserter(state),
               [](const TensorRecord& tensor) { return PartOf(tensor.file) != "extra"; });
  const ContentHash hash = StateHash(state);
  if (hash != manifest.state_hash) {
    report.Add(
        kManifestName, "field state_xxh3_128",
        absl::StrCat("it is ", manifest.state_hash.Hex(),
                     ", the names, types and hashes of the listed tensors give ", hash.Hex()));
  }
}

void VerifyFile(FileSystem& file_system, const std::string& folder, const FileRecord& record,
                std::vector<const TensorRecord*> tensors, Report& report) {
  const absl::StatusOr<std::unique_ptr<ReadableFile>> file =
      file_system.OpenFile(absl::StrCat(folder, "/", record.name));
  if (!file.ok()) {
    report.Add(
        record.name, "",
        absl::IsNotFound(file.status()) ? "is missing" : std::string(file.status().message()));
    return;
  }
  std::stable_sort(
      tensors.begin(), tensors.end(),
      [](const TensorRecord* a, const TensorRecord* b) { return a->offset < b->offset; });
  FileVerifier(**file, record, report).Run(tensors);
}

}  // namespace

absl::StatusOr<Verification> VerifyCheckpoint(FileSystem& file_system, const std::string& folder,
                                              const InspectProgress& progress) {
  Verification verification;
  verification.folder = folder;
  Report early(&verification, 0, &progress);
  const absl::StatusOr<std::string> text = ReadManifestText(file_system, folder);
  if (absl::IsDataLoss(text.status())) {
    early.Add(kManifestName, "", "is missing or too long");
    return verification;
  }
  DDP_RETURN_IF_ERROR(text.status());
  if (const absl::Status hash = CheckManifestHash(*text); !hash.ok()) {
    early.Add(kManifestName, "", std::string(hash.message()));
  }
  const absl::StatusOr<Manifest> manifest = ParseDamagedManifest(*text);
  if (!manifest.ok()) {
    if (verification.is_whole() && !absl::IsDataLoss(manifest.status())) {
      return absl::Status(manifest.status().code(), absl::StrCat(folder, "/", kManifestName, ": ",
                                                                 manifest.status().message()));
    }
    early.Add(kManifestName, "", std::string(manifest.status().message()));
    return verification;
  }
  verification.files = manifest->files.size();
  verification.tensors = manifest->tensors.size();
  Report report(&verification, BytesOf(*manifest), &progress);
  CheckFields(*manifest, folder, report);
  std::map<std::string, std::vector<const TensorRecord*>> tensors;
  for (const TensorRecord& tensor : manifest->tensors) tensors[tensor.file].push_back(&tensor);
  for (const FileRecord& file : manifest->files) {
    VerifyFile(file_system, folder, file, tensors[file.name], report);
  }
  return verification;
}

}  // namespace ddp::elastic
