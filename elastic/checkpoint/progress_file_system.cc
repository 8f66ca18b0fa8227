#include "elastic/checkpoint/progress_file_system.h"

#include <utility>

#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

class ProgressWritableFile final : public WritableFile {
 public:
  ProgressWritableFile(std::unique_ptr<WritableFile> real, std::function<void()> on_progress)
      : real_(std::move(real)), on_progress_(std::move(on_progress)) {}

  absl::Status Reserve(uint64_t bytes) override { return Tell(real_->Reserve(bytes)); }
  absl::Status Append(const char* data, size_t bytes) override {
    return Tell(real_->Append(data, bytes));
  }
  absl::Status Sync() override { return Tell(real_->Sync()); }
  absl::Status Close() override { return real_->Close(); }

 private:
  absl::Status Tell(absl::Status status) const {
    if (status.ok()) on_progress_();
    return status;
  }

  const std::unique_ptr<WritableFile> real_;
  const std::function<void()> on_progress_;
};

class ProgressReadableFile final : public ReadableFile {
 public:
  ProgressReadableFile(std::unique_ptr<ReadableFile> real, std::function<void()> on_progress)
      : real_(std::move(real)), on_progress_(std::move(on_progress)) {}

  uint64_t size() const override { return real_->size(); }
  absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const override {
    DDP_RETURN_IF_ERROR(real_->Read(offset, buffer, bytes));
    on_progress_();
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<ReadableFile> real_;
  const std::function<void()> on_progress_;
};

}  // namespace

ProgressFileSystem::ProgressFileSystem(FileSystem* real, std::function<void()> on_progress)
    : real_(real), on_progress_(std::move(on_progress)) {}

absl::StatusOr<std::unique_ptr<WritableFile>> ProgressFileSystem::CreateFile(
    const std::string& path) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, real_->CreateFile(path));
  return std::make_unique<ProgressWritableFile>(std::move(file), on_progress_);
}

absl::StatusOr<std::unique_ptr<ReadableFile>> ProgressFileSystem::OpenFile(
    const std::string& path) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, real_->OpenFile(path));
  return std::make_unique<ProgressReadableFile>(std::move(file), on_progress_);
}

absl::Status ProgressFileSystem::MakeDirectory(const std::string& path) {
  return real_->MakeDirectory(path);
}

absl::StatusOr<EntryKind> ProgressFileSystem::KindOf(const std::string& path) {
  return real_->KindOf(path);
}

absl::StatusOr<std::vector<std::string>> ProgressFileSystem::ListDirectory(
    const std::string& path) {
  return real_->ListDirectory(path);
}

absl::Status ProgressFileSystem::SyncDirectory(const std::string& path) {
  return real_->SyncDirectory(path);
}

absl::Status ProgressFileSystem::RemoveFile(const std::string& path) {
  return real_->RemoveFile(path);
}

absl::Status ProgressFileSystem::RemoveDirectory(const std::string& path) {
  return real_->RemoveDirectory(path);
}

absl::Status ProgressFileSystem::Rename(const std::string& from, const std::string& to) {
  return real_->Rename(from, to);
}

absl::Status ProgressFileSystem::ReplaceFile(const std::string& from, const std::string& to) {
  return real_->ReplaceFile(from, to);
}

}  // namespace ddp::elastic
