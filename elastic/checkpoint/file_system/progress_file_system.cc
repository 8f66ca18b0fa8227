#include "elastic/checkpoint/file_system/progress_file_system.h"

#include <utility>

#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

class ProgressWritableFile final : public WritableFile {
 public:
  ProgressWritableFile(std::unique_ptr<WritableFile> real, std::string path,
                       std::function<void()> on_progress, StallWatch* watch)
      : real_(std::move(real)),
        path_(std::move(path)),
        on_progress_(std::move(on_progress)),
        watch_(watch) {}

  absl::Status Reserve(uint64_t bytes) override {
    const StallWatch::Call call(watch_, "reserve space for", path_);
    return Tell(real_->Reserve(bytes));
  }
  absl::Status Append(const char* data, size_t bytes) override {
    const StallWatch::Call call(watch_, "write", path_);
    return Tell(real_->Append(data, bytes));
  }
  absl::Status Sync() override {
    const StallWatch::Call call(watch_, "sync", path_);
    return Tell(real_->Sync());
  }
  absl::Status Close() override {
    const StallWatch::Call call(watch_, "close", path_);
    return real_->Close();
  }

 private:
  absl::Status Tell(absl::Status status) const {
    if (status.ok()) on_progress_();
    return status;
  }

  const std::unique_ptr<WritableFile> real_;
  const std::string path_;
  const std::function<void()> on_progress_;
  StallWatch* const watch_;
};

class ProgressReadableFile final : public ReadableFile {
 public:
  ProgressReadableFile(std::unique_ptr<ReadableFile> real, std::string path,
                       std::function<void()> on_progress, StallWatch* watch)
      : real_(std::move(real)),
        path_(std::move(path)),
        on_progress_(std::move(on_progress)),
        watch_(watch) {}

  uint64_t size() const override { return real_->size(); }
  absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const override {
    const StallWatch::Call call(watch_, "read", path_);
    DDP_RETURN_IF_ERROR(real_->Read(offset, buffer, bytes));
    on_progress_();
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<ReadableFile> real_;
  const std::string path_;
  const std::function<void()> on_progress_;
  StallWatch* const watch_;
};

}  // namespace

ProgressFileSystem::ProgressFileSystem(FileSystem* real, std::function<void()> on_progress,
                                       StallWatch* watch)
    : real_(real), on_progress_(std::move(on_progress)), watch_(watch) {}

absl::StatusOr<std::unique_ptr<WritableFile>> ProgressFileSystem::CreateFile(
    const std::string& path) {
  const StallWatch::Call call(watch_, "create", path);
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, real_->CreateFile(path));
  return std::make_unique<ProgressWritableFile>(std::move(file), path, on_progress_, watch_);
}

absl::StatusOr<std::unique_ptr<ReadableFile>> ProgressFileSystem::OpenFile(
    const std::string& path) {
  const StallWatch::Call call(watch_, "open", path);
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, real_->OpenFile(path));
  return std::make_unique<ProgressReadableFile>(std::move(file), path, on_progress_, watch_);
}

absl::Status ProgressFileSystem::MakeDirectory(const std::string& path) {
  const StallWatch::Call call(watch_, "make the folder", path);
  return real_->MakeDirectory(path);
}

absl::StatusOr<EntryKind> ProgressFileSystem::KindOf(const std::string& path) {
  const StallWatch::Call call(watch_, "look at", path);
  return real_->KindOf(path);
}

absl::StatusOr<std::vector<std::string>> ProgressFileSystem::ListDirectory(
    const std::string& path) {
  const StallWatch::Call call(watch_, "list", path);
  return real_->ListDirectory(path);
}

absl::Status ProgressFileSystem::SyncDirectory(const std::string& path) {
  const StallWatch::Call call(watch_, "sync", path);
  return real_->SyncDirectory(path);
}

absl::Status ProgressFileSystem::RemoveFile(const std::string& path) {
  const StallWatch::Call call(watch_, "remove", path);
  return real_->RemoveFile(path);
}

absl::Status ProgressFileSystem::RemoveDirectory(const std::string& path) {
  const StallWatch::Call call(watch_, "remove", path);
  return real_->RemoveDirectory(path);
}

absl::StatusOr<std::unique_ptr<FileLock>> ProgressFileSystem::LockFile(const std::string& path,
                                                                       LockKind kind) {
  const StallWatch::Call call(watch_, "lock", path);
  return real_->LockFile(path, kind);
}

absl::Status ProgressFileSystem::Rename(const std::string& from, const std::string& to) {
  const StallWatch::Call call(watch_, "rename", from);
  return real_->Rename(from, to);
}

absl::Status ProgressFileSystem::ReplaceFile(const std::string& from, const std::string& to) {
  const StallWatch::Call call(watch_, "rename", from);
  return real_->ReplaceFile(from, to);
}

}  // namespace ddp::elastic
