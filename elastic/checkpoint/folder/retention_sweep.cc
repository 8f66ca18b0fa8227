#include "elastic/checkpoint/folder/retention_sweep.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

// Bounds the lines that are kept to be said once.
constexpr size_t kSaidMax = 1000;

bool IsOfRun(const Manifest& manifest, const CheckpointOwner& owner) {
  if (manifest.run_id != owner.run_id) return false;
  const bool is_named = !owner.run_id.empty() && owner.run_id != "none";
  return is_named || manifest.generation_nonce == owner.nonce;
}

uint64_t BytesOf(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const FileRecord& file : manifest.files) bytes += file.bytes;
  return bytes;
}

}  // namespace

// Returns what is known of checkpoint `id`; nullopt: it is not a finished one of this run.
std::optional<FinishedCheckpoint> RetentionSweep::Find(const CheckpointOwner& owner,
                                                       const CheckpointId& id) {
  const auto known = known_.find(id);
  if (known != known_.end()) return known->second;
  const absl::StatusOr<CheckpointStorage::StoredManifest> stored = storage_->ReadManifest(id);
  if (!stored.ok()) return std::nullopt;  // not remembered: the next commit reads it again
  std::optional<FinishedCheckpoint> finished;
  if (IsOfRun(stored->manifest, owner)) {
    finished = {.id = id, .bytes = BytesOf(stored->manifest), .metric = stored->manifest.metric};
  }
  return known_.emplace(id, finished).first->second;
}

void RetentionSweep::SayOnce(const std::string& line) {
  if (said_.size() < kSaidMax && said_.insert(line).second) LOG(WARNING) << line;
}

void RetentionSweep::AfterCommit(const CheckpointOwner& owner, const CheckpointId& committed) {
  const absl::StatusOr<std::vector<CheckpointId>> ids = storage_->List();
  if (!ids.ok()) return SayOnce(absl::StrCat("no checkpoint is removed: ", ids.status().message()));
  std::vector<FinishedCheckpoint> finished;
  std::map<CheckpointId, std::optional<FinishedCheckpoint>> listed;
  for (const CheckpointId& id : *ids) {
    const std::optional<FinishedCheckpoint> found = Find(owner, id);
    if (found.has_value()) finished.push_back(*found);
    if (known_.contains(id)) listed.emplace(id, found);
  }
  known_ = std::move(listed);  // without those that are gone

  std::map<std::string, std::vector<std::string>> removed;  // by reason
  for (const ExpiredCheckpoint& expired : SelectExpired(policy_, finished, committed)) {
    const absl::Status status = storage_->Remove(owner, expired.id);
    if (status.ok()) {
      removed[expired.reason].push_back(FolderName(expired.id));
    } else if (!absl::IsNotFound(status)) {
      SayOnce(absl::StrCat("a checkpoint that retention would remove (", expired.reason,
                           ") stays for now: ", status.message()));
    }
    if (status.ok() || absl::IsNotFound(status)) known_.erase(expired.id);
  }
  for (const auto& [reason, names] : removed) {
    if (said_.size() >= kSaidMax || !said_.insert(reason).second) continue;
    LOG(INFO) << storage_->root() << ": after each save, older checkpoints of this run are removed"
              << " (" << reason << "); the first: " << absl::StrJoin(names, ", ");
  }
}

}  // namespace ddp::elastic
