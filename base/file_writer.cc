#include "base/file_writer.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <utility>

#include "base/status_macros.h"

namespace ddp {
namespace {

// Writes all of `data`; blocks without a limit. Closes a file that cannot be written. Returns the
// error, or "".
std::string WriteAll(UniqueFd& file, const std::string& data) {
  size_t written = 0;
  while (written < data.size() && file.valid()) {
    const ssize_t count = write(file.get(), data.data() + written, data.size() - written);
    if (count >= 0) {
      written += static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      pollfd polled{.fd = file.get(), .events = POLLOUT, .revents = 0};
      (void)poll(&polled, 1, -1);
    } else if (errno != EINTR) {
      file.reset();
      return strerror(errno);
    }
  }
  return "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileWriter>> FileWriter::Create(EventLoop* event_loop,
                                                               std::string name) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<TaskThread> thread,
                       TaskThread::Create(event_loop, std::move(name)));
  return std::unique_ptr<FileWriter>(new FileWriter(std::move(thread)));
}

FileWriter::FileId FileWriter::Add(UniqueFd fd, Callbacks callbacks) {
  const FileId id = next_id_++;
  files_[id] = {.fd = std::make_shared<UniqueFd>(std::move(fd)), .callbacks = std::move(callbacks)};
  return id;
}

void FileWriter::Append(FileId id, std::string data) {
  const auto found = files_.find(id);
  if (found == files_.end() || found->second.is_closing || data.empty()) return;
  const size_t size = data.size();
  found->second.pending += size;
  pending_ += size;
  const auto error = std::make_shared<std::string>();
  thread_->Run(
      [fd = found->second.fd, data = std::move(data), error] { *error = WriteAll(*fd, data); },
      [this, id, size, error] { OnWritten(id, size, *error); });
}

void FileWriter::OnWritten(FileId id, size_t size, const std::string& error) {
  pending_ -= size;
  // The callbacks may add and remove files.
  Callbacks callbacks;
  if (const auto found = files_.find(id); found != files_.end()) {
    File& file = found->second;
    file.pending -= size;
    callbacks = file.callbacks;
    if (file.is_closing && file.pending == 0) files_.erase(found);
  }
  if (!error.empty() && callbacks.on_error) callbacks.on_error(error);
  if (callbacks.on_written) callbacks.on_written();
  if (on_progress_) on_progress_();
}

void FileWriter::Close(FileId id) {
  const auto found = files_.find(id);
  if (found == files_.end()) return;
  if (found->second.pending == 0) {
    files_.erase(found);
  } else {
    found->second.is_closing = true;
  }
}

// The remaining tasks share the descriptor; the last of them closes it.
void FileWriter::Remove(FileId id) { files_.erase(id); }

size_t FileWriter::pending(FileId id) const {
  const auto found = files_.find(id);
  return found == files_.end() ? 0 : found->second.pending;
}

}  // namespace ddp
