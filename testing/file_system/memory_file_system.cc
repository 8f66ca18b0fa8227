#include "testing/file_system/memory_file_system.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "glog/logging.h"

namespace ddp::testing {

using elastic::EntryKind;
using elastic::ReadableFile;
using elastic::WritableFile;

// A file, folder or link: its present state, and the synced state that a power cut leaves.
struct MemoryFileSystem::Node {
  using Entries = std::map<std::string, std::shared_ptr<Node>>;

  bool is_folder = false;
  std::optional<std::string> link;  // of a link: the path that it points to
  std::string content;
  std::string synced_content;
  Entries entries;
  Entries synced_entries;
  int shared_locks = 0;
  bool exclusive_lock = false;

  // Returns this subtree after `loss`.
  std::shared_ptr<Node> After(Loss loss) const {
    auto after = std::make_shared<Node>();
    after->is_folder = is_folder;
    after->link = link;
    const bool keep_content = loss == Loss::kNothing || loss == Loss::kUnsyncedNames;
    const bool keep_names = loss == Loss::kNothing || loss == Loss::kUnsyncedContent;
    after->content = keep_content ? content : synced_content;
    if (loss == Loss::kUnsyncedContent) after->content.resize(content.size(), '\0');
    after->synced_content = after->content;
    for (const auto& [name, node] : keep_names ? entries : synced_entries) {
      after->entries[name] = node->After(loss);
    }
    after->synced_entries = after->entries;
    return after;
  }
};

class MemoryFileSystem::Writer final : public WritableFile {
 public:
  Writer(MemoryFileSystem* owner, std::shared_ptr<Node> node)
      : owner_(owner), node_(std::move(node)) {}

  absl::Status Reserve(uint64_t bytes) override {
    owner_->StandStill();
    MutexLock lock(owner_->mutex_);
    return owner_->Count();
  }

  absl::Status Append(const char* data, size_t bytes) override {
    owner_->StandStill();
    MutexLock lock(owner_->mutex_);
    const absl::Status status = owner_->Count();
    node_->content.append(data, status.ok() ? bytes : bytes / 2);
    return status;
  }

  absl::Status Sync() override {
    owner_->StandStill();
    MutexLock lock(owner_->mutex_);
    DDP_RETURN_IF_ERROR(owner_->Count());
    node_->synced_content = node_->content;
    return absl::OkStatus();
  }

  absl::Status Close() override {
    owner_->StandStill();
    MutexLock lock(owner_->mutex_);
    return owner_->Count();
  }

 private:
  MemoryFileSystem* const owner_;
  const std::shared_ptr<Node> node_;
};

class MemoryFileSystem::Reader final : public ReadableFile {
 public:
  Reader(MemoryFileSystem* owner, std::string path, std::string content)
      : owner_(owner), path_(std::move(path)), content_(std::move(content)) {}

  uint64_t size() const override { return content_.size(); }

  absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const override {
    owner_->StandStill();
    MutexLock lock(owner_->mutex_);
    DDP_RETURN_IF_ERROR(owner_->Count());
    if (offset > content_.size() || bytes > content_.size() - offset) {
      return absl::DataLossError(absl::StrCat(path_, " ends at byte ", content_.size()));
    }
    if (bytes > 0) std::memcpy(buffer, content_.data() + offset, bytes);
    return absl::OkStatus();
  }

 private:
  MemoryFileSystem* const owner_;
  const std::string path_;
  const std::string content_;
};

class MemoryFileSystem::Lock final : public elastic::FileLock {
 public:
  Lock(MemoryFileSystem* owner, std::shared_ptr<Node> node, elastic::LockKind kind)
      : owner_(owner), node_(std::move(node)), kind_(kind) {}
  ~Lock() override {
    MutexLock lock(owner_->mutex_);
    if (kind_ == elastic::LockKind::kShared) {
      --node_->shared_locks;
    } else {
      node_->exclusive_lock = false;
    }
  }

 private:
  MemoryFileSystem* const owner_;
  const std::shared_ptr<Node> node_;
  const elastic::LockKind kind_;
};

MemoryFileSystem::MemoryFileSystem() : root_(std::make_shared<Node>()) { root_->is_folder = true; }

MemoryFileSystem::~MemoryFileSystem() = default;

int64_t MemoryFileSystem::calls() const {
  MutexLock lock(mutex_);
  return calls_;
}

void MemoryFileSystem::FailCall(int64_t call, absl::Status error) {
  MutexLock lock(mutex_);
  failing_calls_[call] = std::move(error);
}

void MemoryFileSystem::FailFromCall(int64_t call, absl::Status error) {
  MutexLock lock(mutex_);
  fail_from_ = call;
  fail_from_error_ = std::move(error);
}

void MemoryFileSystem::RunBeforeCall(int64_t call, std::function<void()> action) {
  MutexLock lock(mutex_);
  before_calls_[call] = std::move(action);
}

void MemoryFileSystem::MakeLink(const std::string& path, const std::string& target) {
  MutexLock lock(mutex_);
  const absl::StatusOr<Place> place = Find(path);
  CHECK(place.ok() && place->node == nullptr) << "no place for a link at " << path;
  auto link = std::make_shared<Node>();
  link->link = target;
  place->folder->entries[place->name] = link;
  place->folder->synced_entries[place->name] = std::move(link);
}

void MemoryFileSystem::PowerCut(Loss loss) {
  MutexLock lock(mutex_);
  root_ = root_->After(loss);
  failing_calls_.clear();
  fail_from_ = INT64_MAX;
}

void MemoryFileSystem::Corrupt(const std::string& path,
                               const std::function<void(std::string&)>& change) {
  MutexLock lock(mutex_);
  const absl::StatusOr<Place> place = Find(path);
  CHECK(place.ok() && place->node != nullptr) << "no file " << path;
  change(place->node->content);
  place->node->synced_content = place->node->content;
}

std::optional<std::string> MemoryFileSystem::Content(const std::string& path) const {
  MutexLock lock(mutex_);
  const absl::StatusOr<Place> place = Find(path);
  if (!place.ok() || place->node == nullptr || place->node->is_folder) return std::nullopt;
  return place->node->content;
}

// Runs the action of the next call. Without the lock, because the action may call this object.
void MemoryFileSystem::StandStill() {
  std::function<void()> action;
  {
    MutexLock lock(mutex_);
    const auto found = before_calls_.find(calls_ + 1);
    if (found == before_calls_.end()) return;
    action = std::move(found->second);
    before_calls_.erase(found);
  }
  action();
}

absl::Status MemoryFileSystem::Count() {
  ++calls_;
  if (calls_ >= fail_from_) return fail_from_error_;
  const auto failing = failing_calls_.find(calls_);
  return failing == failing_calls_.end() ? absl::OkStatus() : failing->second;
}

absl::StatusOr<MemoryFileSystem::Place> MemoryFileSystem::Find(const std::string& path) const {
  const std::vector<std::string> names = absl::StrSplit(path, '/', absl::SkipEmpty());
  Place place{.folder = root_, .name = "", .node = root_};
  for (const std::string& name : names) {
    if (place.node == nullptr) {
      return absl::NotFoundError(absl::StrCat(path, ": no such file or directory"));
    }
    if (!place.node->is_folder) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, place.node->link.has_value() ? ": a link on the way" : ": not a directory"));
    }
    place.folder = place.node;
    place.name = name;
    const auto found = place.folder->entries.find(name);
    place.node = found == place.folder->entries.end() ? nullptr : found->second;
  }
  return place;
}

// Returns `path` with its links replaced by their targets.
std::string MemoryFileSystem::Resolve(std::string path) const {
  constexpr int kLinksMax = 8;
  for (int links = 0; links < kLinksMax; ++links) {
    bool replaced = false;
    for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
      const absl::StatusOr<Place> place = Find(path.substr(0, end));
      if (!place.ok() || place->node == nullptr) break;
      if (place->node->link.has_value()) {
        path = *place->node->link + (end == std::string::npos ? "" : path.substr(end));
        replaced = true;
        break;
      }
      if (end == std::string::npos) break;
    }
    if (!replaced) break;
  }
  return path;
}

absl::StatusOr<std::unique_ptr<WritableFile>> MemoryFileSystem::CreateFile(
    const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(Place place, Find(path));
  if (place.node != nullptr) return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
  place.node = std::make_shared<Node>();
  place.folder->entries[place.name] = place.node;
  return std::make_unique<Writer>(this, place.node);
}

absl::StatusOr<std::unique_ptr<ReadableFile>> MemoryFileSystem::OpenFile(const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(Resolve(path)));
  if (place.node == nullptr) return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  if (place.node->is_folder || place.node->link.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a plain file"));
  }
  return std::make_unique<Reader>(this, path, place.node->content);
}

absl::Status MemoryFileSystem::MakeDirectory(const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node != nullptr) return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
  auto folder = std::make_shared<Node>();
  folder->is_folder = true;
  place.folder->entries[place.name] = std::move(folder);
  return absl::OkStatus();
}

absl::StatusOr<EntryKind> MemoryFileSystem::KindOf(const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  if (place.node->link.has_value()) return EntryKind::kOther;
  return place.node->is_folder ? EntryKind::kDirectory : EntryKind::kFile;
}

absl::StatusOr<std::vector<std::string>> MemoryFileSystem::ListDirectory(const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return absl::NotFoundError(absl::StrCat(path, ": no such folder"));
  if (!place.node->is_folder) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": not a directory"));
  }
  std::vector<std::string> names;
  for (const auto& [name, node] : place.node->entries) names.push_back(name);
  return names;
}

absl::Status MemoryFileSystem::SyncDirectory(const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return absl::NotFoundError(absl::StrCat(path, ": no such folder"));
  if (!place.node->is_folder) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": not a directory"));
  }
  place.node->synced_entries = place.node->entries;
  return absl::OkStatus();
}

absl::Status MemoryFileSystem::Rename(const std::string& from, const std::string& to) {
  StandStill();
  MutexLock lock(mutex_);
  return Move(from, to, /*replace=*/false);
}

absl::Status MemoryFileSystem::ReplaceFile(const std::string& from, const std::string& to) {
  StandStill();
  MutexLock lock(mutex_);
  return Move(from, to, /*replace=*/true);
}

absl::Status MemoryFileSystem::Move(const std::string& from, const std::string& to, bool replace) {
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place source, Find(from));
  DDP_ASSIGN_OR_RETURN(const Place target, Find(to));
  if (source.node == nullptr) return absl::NotFoundError(absl::StrCat(from, ": no such file"));
  if (target.node != nullptr && !replace) {
    return absl::AlreadyExistsError(absl::StrCat(to, " exists"));
  }
  target.folder->entries[target.name] = source.node;
  source.folder->entries.erase(source.name);
  return absl::OkStatus();
}

absl::Status MemoryFileSystem::RemoveFile(const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  if (place.node->is_folder) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is a directory"));
  }
  place.folder->entries.erase(place.name);
  return absl::OkStatus();
}

absl::Status MemoryFileSystem::RemoveDirectory(const std::string& path) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return absl::NotFoundError(absl::StrCat(path, ": no such folder"));
  if (!place.node->is_folder) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": not a directory"));
  }
  if (!place.node->entries.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": directory not empty"));
  }
  place.folder->entries.erase(place.name);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<elastic::FileLock>> MemoryFileSystem::LockFile(
    const std::string& path, elastic::LockKind kind) {
  StandStill();
  MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Count());
  DDP_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  if (place.node->is_folder || place.node->link.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a plain file"));
  }
  const bool excluded = place.node->exclusive_lock ||
                        (kind == elastic::LockKind::kExclusive && place.node->shared_locks > 0);
  if (excluded) return absl::UnavailableError(absl::StrCat(path, " is locked"));
  if (kind == elastic::LockKind::kShared) {
    ++place.node->shared_locks;
  } else {
    place.node->exclusive_lock = true;
  }
  return std::make_unique<Lock>(this, place.node, kind);
}

}  // namespace ddp::testing
