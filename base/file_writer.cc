#include "base/file_writer.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <utility>

#include "base/status_macros.h"

namespace ddp {
namespace {

struct Attempt {
  size_t written = 0;
  int error = 0;  // errno of the write that has failed
};

bool IsFullDisk(int error) { return error == ENOSPC || error == EDQUOT; }

}  // namespace

// A file as the thread knows it.
struct FileWriter::Output {
  UniqueFd fd;
  std::string (*gap_line)(size_t) = nullptr;
  size_t dropped = 0;           // bytes that did not fit since the last gap line
  bool ends_in_a_line = false;  // the last byte in the file is no newline

  // Writes `data`; blocks until all of it is written or a write fails.
  Attempt Write(const std::string& data) {
    Attempt attempt;
    while (attempt.written < data.size() && attempt.error == 0) {
      const ssize_t count =
          write(fd.get(), data.data() + attempt.written, data.size() - attempt.written);
      if (count >= 0) {
        attempt.written += static_cast<size_t>(count);
      } else if (errno == EAGAIN) {
        pollfd polled{.fd = fd.get(), .events = POLLOUT, .revents = 0};
        (void)poll(&polled, 1, -1);
      } else if (errno != EINTR) {
        attempt.error = errno;
      }
    }
    if (attempt.written > 0) ends_in_a_line = data[attempt.written - 1] != '\n';
    return attempt;
  }

  // Writes the line for the bytes that were dropped.
  Attempt WriteGap() { return Write((ends_in_a_line ? "\n" : "") + gap_line(dropped)); }
};

// Writes `data`; blocks without a limit. Closes a file that cannot be written. Returns the error
// that has ended the file, or "".
std::string FileWriter::WriteAll(Output& output, const std::string& data) {
  if (!output.fd.valid()) return "";
  size_t written = 0;
  int error = output.dropped > 0 ? output.WriteGap().error : 0;
  if (error == 0) {
    const Attempt attempt = output.Write(data);
    written = attempt.written;
    error = attempt.error;
    output.dropped = 0;
  }
  if (error == 0) return "";
  if (IsFullDisk(error) && output.gap_line != nullptr) {
    output.dropped += data.size() - written;
    return "";
  }
  output.fd.reset();
  return strerror(error);
}

absl::StatusOr<std::unique_ptr<FileWriter>> FileWriter::Create(EventLoop* event_loop,
                                                               std::string name) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<TaskThread> thread,
                       TaskThread::Create(event_loop, std::move(name)));
  return std::unique_ptr<FileWriter>(new FileWriter(std::move(thread)));
}

FileWriter::FileId FileWriter::Add(UniqueFd fd, Callbacks callbacks) {
  const FileId id = next_id_++;
  files_[id] = {.output = std::make_shared<Output>(
                    Output{.fd = std::move(fd), .gap_line = callbacks.gap_line}),
                .callbacks = std::move(callbacks)};
  return id;
}

void FileWriter::Append(FileId id, std::string data) {
  const auto found = files_.find(id);
  if (found == files_.end() || found->second.is_closing || data.empty()) return;
  const size_t size = data.size();
  found->second.pending += size;
  pending_ += size;
  const auto error = std::make_shared<std::string>();
  thread_->Run([output = found->second.output, data = std::move(data),
                error] { *error = WriteAll(*output, data); },
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
