#include "elastic/checkpoint/load_checkpoint.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/checkpoint_selection.h"
#include "elastic/checkpoint/shard_plan.h"
#include "elastic/checkpoint/wire_status.h"

namespace ddp::elastic {
namespace {

// What this rank has read of one checkpoint.
struct Candidate {
  LoadedCheckpoint checkpoint;
  std::string manifest_hash;
  std::vector<std::string> mismatches;
};

class Loader {
 public:
  Loader(const CheckpointStorage& storage, CheckpointGroup& group,
         const FindMismatches& find_mismatches)
      : storage_(storage), group_(group), find_mismatches_(find_mismatches) {}

  absl::StatusOr<std::optional<LoadedCheckpoint>> Run();

 private:
  Proposal Propose();
  absl::StatusOr<Candidate> Read(const CheckpointId& id) const;
  absl::Status ReadFiles(LoadedCheckpoint& checkpoint) const;
  bool IsBelowBound(const CheckpointId& id) const;
  absl::StatusOr<Verdict> Decide(const Proposal& proposal);

  const CheckpointStorage& storage_;
  CheckpointGroup& group_;
  const FindMismatches& find_mismatches_;
  std::optional<Verdict> bound_;        // of the last round; none yet: any checkpoint
  std::optional<Candidate> candidate_;  // what we propose
  std::vector<std::string> passed_over_;
};

bool Loader::IsBelowBound(const CheckpointId& id) const {
  if (!bound_.has_value()) return true;
  return id < bound_->bound || (bound_->bound_included && id == bound_->bound);
}

// The newest below the bound that can be read. An error to list counts as nothing seen.
Proposal Loader::Propose() {
  Proposal proposal;
  const absl::StatusOr<std::vector<CheckpointId>> ids = storage_.List();
  if (!ids.ok()) passed_over_.push_back(std::string(ids.status().message()));
  const std::vector<CheckpointId> listed = ids.ok() ? *ids : std::vector<CheckpointId>();
  // A folder that cannot be listed is not an empty one.
  proposal.listed = ids.ok() ? static_cast<int64_t>(listed.size()) : 1;
  if (candidate_.has_value() && !IsBelowBound(candidate_->checkpoint.manifest.id)) {
    candidate_.reset();
  }
  for (const CheckpointId& id : listed) {
    if (candidate_.has_value()) break;
    if (!IsBelowBound(id)) continue;
    absl::StatusOr<Candidate> candidate = Read(id);
    if (candidate.ok()) {
      candidate_ = *std::move(candidate);
    } else {
      passed_over_.push_back(std::string(candidate.status().message()));
    }
  }
  if (candidate_.has_value()) {
    proposal.id = candidate_->checkpoint.manifest.id;
    proposal.manifest_hash = candidate_->manifest_hash;
    proposal.mismatches = candidate_->mismatches;
  }
  proposal.passed_over = passed_over_;
  return proposal;
}

absl::StatusOr<Candidate> Loader::Read(const CheckpointId& id) const {
  DDP_ASSIGN_OR_RETURN(CheckpointStorage::StoredManifest stored, storage_.ReadManifest(id));
  Candidate candidate;
  candidate.manifest_hash = stored.hash.Hex();
  candidate.mismatches = find_mismatches_(stored.manifest);
  candidate.checkpoint.manifest = std::move(stored.manifest);
  // One that does not fit will not be loaded, whatever its bytes are.
  if (candidate.mismatches.empty()) DDP_RETURN_IF_ERROR(ReadFiles(candidate.checkpoint));
  return candidate;
}

// The model's and the optimizer's files, and our own extra file; the other ranks' are dealt out so
// that each is checked by somebody.
absl::Status Loader::ReadFiles(LoadedCheckpoint& checkpoint) const {
  const std::string own_extra = ExtraFileName(group_.rank());
  int extra_number = 0;
  for (const FileRecord& record : checkpoint.manifest.files) {
    std::map<std::string, TensorView>* tensors = nullptr;
    if (absl::StartsWith(record.name, "model-")) tensors = &checkpoint.model;
    if (absl::StartsWith(record.name, "optimizer-")) tensors = &checkpoint.optimizer;
    if (record.name == own_extra) tensors = &checkpoint.extra;
    if (tensors == nullptr && extra_number++ % group_.world_size() != group_.rank()) continue;
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
    return EncodeResult(EncodeVerdict(SelectCheckpoint(proposals, storage_.root())));
  };
  DDP_ASSIGN_OR_RETURN(const std::string answer, group_.Decide(EncodeProposal(proposal), select));
  DDP_ASSIGN_OR_RETURN(const std::string text, DecodeResult(answer));
  return ParseVerdict(text);
}

absl::StatusOr<std::optional<LoadedCheckpoint>> Loader::Run() {
  // Ends: each round lowers the bound, and ids below it are finitely many files.
  while (true) {
    const Proposal proposal = Propose();
    DDP_ASSIGN_OR_RETURN(Verdict verdict, Decide(proposal));
    switch (verdict.kind) {
      case Verdict::Kind::kEmpty:
        return std::optional<LoadedCheckpoint>();
      case Verdict::Kind::kFail:
        return verdict.does_not_fit ? absl::FailedPreconditionError(verdict.reason)
                                    : absl::DataLossError(verdict.reason);
      case Verdict::Kind::kLoad:
        candidate_->checkpoint.passed_over = std::move(verdict.passed_over);
        return std::optional<LoadedCheckpoint>(std::move(candidate_->checkpoint));
      case Verdict::Kind::kTryOlder:
        if (!IsBelowBound(verdict.bound) && bound_.has_value()) {
          return absl::InternalError("the search for a checkpoint does not come to an end");
        }
        if (!verdict.bound_included) passed_over_.push_back(verdict.reason);
        bound_ = std::move(verdict);
        break;
    }
  }
}

}  // namespace

absl::StatusOr<std::optional<LoadedCheckpoint>> LoadNewestCheckpoint(
    const CheckpointStorage& storage, CheckpointGroup& group,
    const FindMismatches& find_mismatches) {
  return Loader(storage, group, find_mismatches).Run();
}

}  // namespace ddp::elastic
