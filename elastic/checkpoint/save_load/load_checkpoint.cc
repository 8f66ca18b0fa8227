#include "elastic/checkpoint/save_load/load_checkpoint.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/group/wire_status.h"
#include "elastic/checkpoint/save_load/checkpoint_selection.h"
#include "elastic/checkpoint/save_load/shard_plan.h"

namespace ddp::elastic {
namespace {

// Bounds the listings of the folder while its checkpoints are removed.
constexpr int kListingsMax = 10;

// The parts of one checkpoint that this rank has read.
struct Candidate {
  LoadedCheckpoint checkpoint;
  std::string manifest_hash;
  std::vector<std::string> mismatches;
  std::unique_ptr<FileLock> lock;  // keeps retention from removing it; null: no locks here
};

class Loader {
 public:
  Loader(const CheckpointStorage& storage, CheckpointGroup& group,
         const FindMismatches& find_mismatches, const LoadOptions& options)
      : storage_(storage), group_(group), find_mismatches_(find_mismatches), options_(options) {}

  absl::StatusOr<std::optional<LoadedCheckpoint>> Run();

 private:
  Proposal Propose();
  Proposal SearchFolder();
  void Search(const std::vector<CheckpointId>& listed, Proposal& proposal);
  absl::StatusOr<Candidate> Read(const CheckpointId& id, std::string& file) const;
  absl::Status ReadFiles(LoadedCheckpoint& checkpoint, std::string& path) const;
  bool IsBelowBound(const CheckpointId& id) const;
  absl::StatusOr<Verdict> Decide(const Proposal& proposal);

  const CheckpointStorage& storage_;
  CheckpointGroup& group_;
  const FindMismatches& find_mismatches_;
  const LoadOptions& options_;
  std::optional<CheckpointId> bound_;   // only older checkpoints are read; none: any
  int retries_ = 0;                     // at this bound
  std::vector<std::string> look_for_;   // of the last verdict
  std::optional<Candidate> candidate_;  // this rank's proposal
  std::vector<CheckpointId> damaged_;
  std::vector<std::string> passed_over_;
};

bool Loader::IsBelowBound(const CheckpointId& id) const {
  return !bound_.has_value() || id < *bound_;
}

Proposal Loader::Propose() {
  Proposal proposal = SearchFolder();
  // Retention may have removed the checkpoint since it was listed. A newer one came before that.
  for (int look = 0; look < kListingsMax && proposal.obstacle.has_value() &&
                     proposal.obstacle->id.has_value() && storage_.IsGone(*proposal.obstacle->id);
       ++look) {
    proposal = SearchFolder();
  }
  for (const std::string& path : look_for_) {
    if (storage_.IsMissing(path)) proposal.absent.push_back(path);
  }
  proposal.damaged = damaged_;
  proposal.passed_over = passed_over_;
  return proposal;
}

Proposal Loader::SearchFolder() {
  Proposal proposal;
  const absl::StatusOr<std::vector<CheckpointId>> ids = storage_.List();
  if (ids.ok()) {
    proposal.listed = static_cast<int64_t>(ids->size());
    Search(*ids, proposal);
  } else {
    // A folder that cannot be listed must not count as empty.
    proposal.listed = 1;
    proposal.obstacle = Proposal::Obstacle{.message = std::string(ids.status().message())};
  }
  return proposal;
}

// Reads the newest checkpoint below the bound that is not damaged, and adds it to `proposal`.
void Loader::Search(const std::vector<CheckpointId>& listed, Proposal& proposal) {
  if (candidate_.has_value() && !IsBelowBound(candidate_->checkpoint.manifest.id)) {
    candidate_.reset();
  }
  for (const CheckpointId& id : listed) {
    const bool is_known = std::find(damaged_.begin(), damaged_.end(), id) != damaged_.end();
    if (is_known || !IsBelowBound(id)) continue;
    if (candidate_.has_value() && candidate_->checkpoint.manifest.id == id) break;
    std::string file;
    absl::StatusOr<Candidate> candidate = Read(id, file);
    if (candidate.ok()) {
      candidate_ = *std::move(candidate);
      break;
    }
    const std::string message = std::string(candidate.status().message());
    if (!absl::IsDataLoss(candidate.status())) {
      if (!absl::IsNotFound(candidate.status())) file.clear();
      proposal.obstacle = Proposal::Obstacle{.id = id, .file = file, .message = message};
      return;
    }
    damaged_.push_back(id);
    passed_over_.push_back(message);
  }
  if (!candidate_.has_value()) return;
  proposal.id = candidate_->checkpoint.manifest.id;
  proposal.manifest_hash = candidate_->manifest_hash;
  proposal.mismatches = candidate_->mismatches;
}

// Reads one checkpoint. After an error `file` names the file that was read last.
absl::StatusOr<Candidate> Loader::Read(const CheckpointId& id, std::string& file) const {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<FileLock> lock, storage_.LockForReading(id));
  file = absl::StrCat(storage_.Folder(id), "/", kManifestName);
  DDP_ASSIGN_OR_RETURN(CheckpointStorage::StoredManifest stored, storage_.ReadManifest(id));
  Candidate candidate;
  candidate.lock = std::move(lock);
  candidate.manifest_hash = stored.hash.Hex();
  candidate.mismatches = find_mismatches_(stored.manifest);
  candidate.checkpoint.manifest = std::move(stored.manifest);
  // A checkpoint that does not fit is never loaded, so its files need no check.
  if (candidate.mismatches.empty()) DDP_RETURN_IF_ERROR(ReadFiles(candidate.checkpoint, file));
  return candidate;
}

// Reads the files of the model and the optimizer and this rank's extra file. The other extra files
// are spread over the ranks, so that some rank checks each.
absl::Status Loader::ReadFiles(LoadedCheckpoint& checkpoint, std::string& path) const {
  const std::string own_extra = ExtraFileName(group_.rank());
  int extra_number = 0;
  for (const FileRecord& record : checkpoint.manifest.files) {
    std::map<std::string, TensorView>* tensors = nullptr;
    if (absl::StartsWith(record.name, "model-")) tensors = &checkpoint.model;
    if (absl::StartsWith(record.name, "optimizer-")) tensors = &checkpoint.optimizer;
    if (record.name == own_extra) tensors = &checkpoint.extra;
    if (tensors == nullptr && extra_number++ % group_.world_size() != group_.rank()) continue;
    path = absl::StrCat(storage_.Folder(checkpoint.manifest.id), "/", record.name);
    DDP_ASSIGN_OR_RETURN(LoadedFile file, storage_.LoadFile(checkpoint.manifest, record));
    if (tensors == nullptr) continue;
    for (const TensorView& tensor : file.tensors) {
      if (tensors->emplace(tensor.name, tensor).second) continue;
      return absl::DataLossError(absl::StrCat(storage_.Folder(checkpoint.manifest.id), ": tensor ",
                                              tensor.name, " stands in two files"));
    }
    checkpoint.files.push_back(std::move(file));
  }
  return absl::OkStatus();
}

absl::StatusOr<Verdict> Loader::Decide(const Proposal& proposal) {
  const auto select = [this](const std::vector<std::string>& values) {
    std::vector<Proposal> proposals;
    for (const std::string& value : values) {
      absl::StatusOr<Proposal> parsed = ParseProposal(value);
      if (!parsed.ok()) return EncodeResult(parsed.status());
      proposals.push_back(*std::move(parsed));
    }
    return EncodeResult(
        EncodeVerdict(SelectCheckpoint(proposals, storage_.root(), retries_ <= options_.retries)));
  };
  DDP_ASSIGN_OR_RETURN(const std::string answer, group_.Decide(EncodeProposal(proposal), select));
  DDP_ASSIGN_OR_RETURN(const std::string text, DecodeResult(answer));
  return ParseVerdict(text);
}

absl::Status Failure(const Verdict& verdict) {
  if (verdict.does_not_fit) return absl::FailedPreconditionError(verdict.reason);
  if (verdict.is_damage) return absl::DataLossError(verdict.reason);
  return absl::UnavailableError(verdict.reason);
}

absl::StatusOr<std::optional<LoadedCheckpoint>> Loader::Run() {
  group_.StartAttempt(CheckpointGroup::Patience::kLong);
  // The loop ends: each round lowers the bound, and finitely many IDs lie below it, or is one of a
  // bounded number of retries.
  while (true) {
    const Proposal proposal = Propose();
    DDP_ASSIGN_OR_RETURN(Verdict verdict, Decide(proposal));
    look_for_ = std::move(verdict.look_for);
    switch (verdict.kind) {
      case Verdict::Kind::kEmpty:
        return std::optional<LoadedCheckpoint>();
      case Verdict::Kind::kFail:
        return Failure(verdict);
      case Verdict::Kind::kLoad:
        if (!candidate_.has_value()) {
          return absl::InternalError("the ranks agree on a checkpoint that this one has not read");
        }
        candidate_->checkpoint.passed_over = std::move(verdict.passed_over);
        return std::optional<LoadedCheckpoint>(std::move(candidate_->checkpoint));
      case Verdict::Kind::kRetry:
        if (retries_ > options_.retries) {
          return absl::InternalError("the search for a checkpoint does not come to an end");
        }
        if (verdict.read_again) candidate_.reset();
        // In the first retry, without a pause, the ranks only look for files that another misses.
        PauseBeforeRetry(options_, retries_++);
        break;
      case Verdict::Kind::kTryOlder:
        if (!IsBelowBound(verdict.bound)) {
          return absl::InternalError("the search for a checkpoint does not come to an end");
        }
        if (!verdict.reason.empty()) passed_over_.push_back(verdict.reason);
        bound_ = verdict.bound;
        retries_ = 0;
        break;
    }
  }
}

}  // namespace

void PauseBeforeRetry(const LoadOptions& options, int retry) {
  if (retry == 0) return;
  const absl::Duration duration = options.first_pause * (1 << std::min(retry - 1, 10));
  options.pause == nullptr ? Pause(duration) : options.pause(duration);
}

absl::StatusOr<std::optional<LoadedCheckpoint>> LoadNewestCheckpoint(
    const CheckpointStorage& storage, CheckpointGroup& group, const FindMismatches& find_mismatches,
    const LoadOptions& options) {
  return Loader(storage, group, find_mismatches, options).Run();
}

}  // namespace ddp::elastic
