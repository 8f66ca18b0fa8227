#include "elastic/checkpoint/save_load/save_checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/format/safetensors_writer.h"
#include "elastic/checkpoint/group/wire_status.h"
#include "elastic/checkpoint/save_load/shard_plan.h"

namespace ddp::elastic {
namespace {

// Describes the state that must be equal on all ranks before a file is written. The text also
// appears in messages.
std::string Agreement(const CheckpointContents& contents, const std::vector<Shard>& plan) {
  return absl::StrCat("step ", contents.description.id.step, " of epoch ",
                      contents.description.epoch, ", generation ",
                      contents.description.id.generation, ", tensors ", PlanHash(plan).Hex());
}

absl::Status CheckAgreement(const std::vector<std::string>& values) {
  std::string first;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const absl::StatusOr<std::string> agreement = DecodeResult(values[rank]);
    if (!agreement.ok()) return FromRank(rank, agreement.status());
    if (rank == 0) first = *agreement;
    if (*agreement != first) {
      return absl::InvalidArgumentError(
          absl::StrCat("the ranks do not save the same state: rank 0 has ", first, "; rank ", rank,
                       " has ", *agreement));
    }
  }
  return absl::OkStatus();
}

absl::Status WriteFile(FileSystem& file_system, const std::string& folder, const std::string& name,
                       const std::vector<TensorView>& tensors, WrittenRecords& records) {
  DDP_ASSIGN_OR_RETURN(const WrittenFile written,
                       WriteSafetensors(file_system, absl::StrCat(folder, "/", name), tensors));
  records.files.push_back({name, written.bytes, written.hash});
  for (const WrittenTensor& tensor : written.tensors) {
    records.tensors.push_back(
        {tensor.name, name, tensor.type, tensor.offset, tensor.bytes, tensor.hash});
  }
  return absl::OkStatus();
}

// Writes this rank's files durably. Returns their records as a text for rank 0.
absl::StatusOr<std::string> WriteShare(FileSystem& file_system, const std::string& folder,
                                       const std::vector<Shard>& plan,
                                       const CheckpointContents& contents, int rank) {
  WrittenRecords records;
  for (const Shard& shard : plan) {
    if (shard.rank != rank) continue;
    DDP_RETURN_IF_ERROR(WriteFile(file_system, folder, shard.file, shard.tensors, records));
  }
  DDP_RETURN_IF_ERROR(WriteFile(file_system, folder, ExtraFileName(rank), contents.extra, records));
  DDP_RETURN_IF_ERROR(file_system.SyncDirectory(folder));
  return EncodeRecords(records);
}

std::string AbsolutePath(const std::string& path) {
  std::error_code error;  // for instance when the current folder was removed
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.string();
}

// Returns OK when this rank sees rank 0's new folder, soon or at once. kNotFound has the absolute
// path. Other errors are left to the writing.
absl::Status AwaitFolder(FileSystem& file_system, const std::string& folder,
                         const LoadOptions& options) {
  for (int retry = 0; absl::IsNotFound(file_system.KindOf(folder).status()); ++retry) {
    if (retry > options.retries) return absl::NotFoundError(AbsolutePath(folder));
    PauseBeforeRetry(options, retry);
  }
  return absl::OkStatus();
}

// Checks that all ranks see `folder`, which rank 0 has made. values: by rank, the share or its
// error.
absl::Status CheckFolderIsShared(FileSystem& file_system, const std::string& folder,
                                 const std::vector<std::string>& values, bool was_shared) {
  std::vector<size_t> blind;
  std::string path;  // of the first of them
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const absl::Status share = DecodeResult(values[rank]).status();
    if (!absl::IsNotFound(share)) continue;
    if (blind.empty()) path = std::string(share.message());
    blind.push_back(rank);
  }
  // Another claim of the folder may have removed it, for rank 0 too.
  if (blind.empty() || !file_system.KindOf(folder).ok()) return absl::OkStatus();
  return absl::Status(
      was_shared ? absl::StatusCode::kUnavailable : absl::StatusCode::kFailedPrecondition,
      absl::StrCat("all ranks need the same checkpoint folder, on a file system that they share: "
                   "rank 0 saves into ",
                   AbsolutePath(folder), ", and ", blind.size() == 1 ? "rank " : "ranks ",
                   absl::StrJoin(blind, ", "), " of ", values.size(), " cannot find ", path));
}

absl::StatusOr<Manifest> CompleteManifest(Manifest manifest,
                                          const std::vector<std::string>& values) {
  manifest.world_size = static_cast<int>(values.size());
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const absl::StatusOr<std::string> text = DecodeResult(values[rank]);
    if (!text.ok()) return FromRank(rank, text.status());
    absl::StatusOr<WrittenRecords> records = ParseRecords(*text);
    if (!records.ok()) return FromRank(rank, records.status());
    std::move(records->files.begin(), records->files.end(), std::back_inserter(manifest.files));
    std::move(records->tensors.begin(), records->tensors.end(),
              std::back_inserter(manifest.tensors));
  }
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const FileRecord& a, const FileRecord& b) { return a.name < b.name; });
  std::sort(manifest.tensors.begin(), manifest.tensors.end(),
            [](const TensorRecord& a, const TensorRecord& b) {
              return std::tie(a.file, a.offset, a.bytes, a.name) <
                     std::tie(b.file, b.offset, b.bytes, b.name);
            });
  std::vector<TensorRecord> state;
  std::copy_if(manifest.tensors.begin(), manifest.tensors.end(), std::back_inserter(state),
               [](const TensorRecord& tensor) { return !absl::StartsWith(tensor.file, "extra-"); });
  manifest.state_hash = StateHash(state);
  return manifest;
}

std::vector<Shard> PlanOf(const CheckpointContents& contents, int world_size,
                          uint64_t file_bytes_max) {
  return PlanShards({.buffers = contents.buffers,
                     .parameters = contents.parameters,
                     .optimizer = contents.optimizer,
                     .world_size = world_size,
                     .file_bytes_max = file_bytes_max});
}

// Runs the save on one rank. After an error `folder` names the folder that rank 0 must remove;
// empty: none.
absl::StatusOr<std::string> Save(FileSystem& file_system, CheckpointStorage& storage,
                                 CheckpointGroup& group, const SaveOptions& options,
                                 const absl::StatusOr<CheckpointContents>& contents,
                                 std::string& folder) {
  if (absl::IsAborted(contents.status())) {  // the other ranks may never come
    group.Leave(contents.status());
    return contents.status();
  }
  std::vector<Shard> plan;
  std::string agreement;
  if (!contents.ok()) {
    agreement = EncodeResult(contents.status());
  } else {
    plan = PlanOf(*contents, group.world_size(), options.file_bytes_max);
    agreement = EncodeResult(Agreement(*contents, plan));
  }
  const auto begin = [&](const std::vector<std::string>& values) {
    const absl::Status agreed = CheckAgreement(values);
    if (!agreed.ok()) return EncodeResult(agreed);
    const absl::Status held = options.hold_back == nullptr ? absl::OkStatus() : options.hold_back();
    if (!held.ok()) return EncodeResult(held);
    const absl::StatusOr<std::string> work = storage.Begin(options.owner, contents->description.id);
    if (work.ok()) folder = *work;  // to be removed also when the answer does not reach the ranks
    return EncodeResult(work);
  };
  DDP_ASSIGN_OR_RETURN(const std::string begun, group.Decide(agreement, begin));
  DDP_ASSIGN_OR_RETURN(folder, DecodeResult(begun));

  absl::Status seen;  // rank 0 has made the folder
  if (group.rank() != 0) seen = AwaitFolder(file_system, folder, options.wait_for_folder);
  const absl::StatusOr<std::string> share =
      seen.ok() ? WriteShare(file_system, folder, plan, *contents, group.rank()) : seen;
  const auto commit = [&](const std::vector<std::string>& values) {
    const absl::Status shared =
        CheckFolderIsShared(file_system, folder, values, options.folder_is_shared);
    if (!shared.ok()) return EncodeResult(shared);
    absl::StatusOr<Manifest> manifest = CompleteManifest(contents->description, values);
    if (!manifest.ok()) return EncodeResult(manifest.status());
    return EncodeResult(storage.Commit(options.owner, folder, *manifest));
  };
  DDP_ASSIGN_OR_RETURN(const std::string committed, group.Decide(EncodeResult(share), commit));
  return DecodeResult(committed);
}

}  // namespace

WrittenShare WrittenTensors(const CheckpointContents& contents, int rank, int world_size,
                            uint64_t file_bytes_max) {
  // A tensor of the model and one of the optimizer may have the same name.
  std::set<std::string> of_model;
  std::set<std::string> of_optimizer;
  for (const Shard& shard : PlanOf(contents, world_size, file_bytes_max)) {
    if (shard.rank != rank) continue;
    std::set<std::string>& names =
        absl::StartsWith(shard.file, "optimizer-") ? of_optimizer : of_model;
    for (const TensorView& tensor : shard.tensors) names.insert(tensor.name);
  }
  const auto written = [](const std::vector<TensorView>& tensors,
                          const std::set<std::string>& names) {
    std::vector<bool> flags;
    for (const TensorView& tensor : tensors) flags.push_back(names.contains(tensor.name));
    return flags;
  };
  return {.parameters = written(contents.parameters, of_model),
          .buffers = written(contents.buffers, of_model),
          .optimizer = written(contents.optimizer, of_optimizer)};
}

absl::StatusOr<std::string> SaveCheckpoint(FileSystem& file_system, CheckpointStorage& storage,
                                           CheckpointGroup& group, const SaveOptions& options,
                                           const absl::StatusOr<CheckpointContents>& contents) {
  group.StartAttempt(CheckpointGroup::Patience::kShort);
  std::string folder;
  absl::StatusOr<std::string> saved = Save(file_system, storage, group, options, contents, folder);
  if (group.rank() != 0) return saved;
  if (!saved.ok() && !folder.empty()) storage.Abandon(folder);
  if (saved.ok() && options.after_commit != nullptr) {
    options.after_commit(contents->description.id);
  }
  return saved;
}

}  // namespace ddp::elastic
