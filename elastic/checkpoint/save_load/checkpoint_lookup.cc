#include "elastic/checkpoint/save_load/checkpoint_lookup.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/format/checkpoint_id.h"

namespace ddp::elastic {
namespace {

// Returns true when a later look finds the same.
bool IsFinal(const absl::Status& error) {
  return absl::IsNotFound(error) || absl::IsDataLoss(error) || absl::IsFailedPrecondition(error);
}

// Returns the result of `look`, and calls it again after an error that is not final.
template <typename Look, typename Final>
auto Retried(const LoadOptions& options, const Look& look, const Final& is_final) {
  for (int retry = 0;; ++retry) {
    auto result = look();
    if (result.ok() || is_final(result.status()) || retry > options.retries) return result;
    PauseBeforeRetry(options, retry);
  }
}

absl::StatusOr<std::string> LookForRunId(const CheckpointStorage& storage) {
  DDP_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids, storage.List());
  for (const CheckpointId& id : ids) {
    const absl::StatusOr<CheckpointStorage::StoredManifest> stored = storage.ReadManifest(id);
    if (stored.ok()) return stored->manifest.run_id;
    // A passing fault, such as a lack of descriptors, does not show whose checkpoint it is.
    if (absl::IsDataLoss(stored.status()) || absl::IsNotFound(stored.status())) continue;
    return stored.status();
  }
  return std::string();
}

// Asks for the token of the job of `mine`, to be compared with that of the folder's owner.
absl::StatusOr<std::string> AskForToken(const CheckpointStorage& storage,
                                        const CheckpointOwner& mine, const CheckpointOwner& owner,
                                        const AskRendezvous& ask, const LoadOptions& options) {
  absl::StatusOr<std::string> token = Retried(
      options, ask, [](const absl::Status& error) { return absl::IsFailedPrecondition(error); });
  if (token.ok()) return token;
  if (absl::IsFailedPrecondition(token.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        storage.root(), ": ", OwnerText(mine), " may not continue: ", token.status().message()));
  }
  return absl::UnavailableError(absl::StrCat(
      storage.root(), " holds checkpoints of ", OwnerText(owner),
      ". The rendezvous does not answer whether that is this job (", token.status().message(),
      "): start the job again when it answers, or let the job resume from any checkpoints"));
}

}  // namespace

absl::StatusOr<bool> HasCheckpoint(const CheckpointStorage& storage, const LoadOptions& options) {
  DDP_ASSIGN_OR_RETURN(const std::vector<CheckpointId> ids,
                       Retried(
                           options, [&storage] { return storage.List(); }, IsFinal));
  return !ids.empty();
}

absl::StatusOr<std::string> NewestRunId(const CheckpointStorage& storage,
                                        const LoadOptions& options) {
  return Retried(
      options, [&storage] { return LookForRunId(storage); }, IsFinal);
}

absl::StatusOr<bool> HoldsOwnCheckpoints(const CheckpointStorage& storage, CheckpointOwner mine,
                                         const AskRendezvous& ask, const LoadOptions& options) {
  DDP_ASSIGN_OR_RETURN(const bool has_checkpoint, HasCheckpoint(storage, options));
  if (!has_checkpoint) return false;
  DDP_ASSIGN_OR_RETURN(const std::string run_id, NewestRunId(storage, options));
  if (run_id != mine.run_id) return false;
  const absl::StatusOr<CheckpointOwner> owner = Retried(
      options, [&storage] { return storage.Owner(); }, IsFinal);
  if (absl::IsNotFound(owner.status())) return false;
  DDP_RETURN_IF_ERROR(owner.status());
  if (ask != nullptr && !owner->job.empty()) {
    DDP_ASSIGN_OR_RETURN(mine.job, AskForToken(storage, mine, *owner, ask, options));
  }
  return MayBeOfOneJob(mine, *owner);
}

}  // namespace ddp::elastic
