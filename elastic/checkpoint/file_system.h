#ifndef DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_H_
#define DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::elastic {

// A file being written from its start to its end. Thread-compatible. Closed when destroyed; whoever
// must know that all went well calls Sync() and Close().
class WritableFile {
 public:
  virtual ~WritableFile() = default;

  // Takes `bytes` of disk for the file now, so that a full disk shows before the work. A file
  // system that cannot reserve says OK. The file's size stays what was appended.
  virtual absl::Status Reserve(uint64_t bytes) = 0;
  virtual absl::Status Append(const char* data, size_t bytes) = 0;

  // On OK the content survives a power cut; its name in the directory does only after
  // SyncDirectory(). After an error the file is lost: a second Sync() may say OK falsely.
  virtual absl::Status Sync() = 0;
  virtual absl::Status Close() = 0;
};

// A file being read. Safe for concurrent use.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;

  // When it was opened.
  virtual uint64_t size() const = 0;

  // Fills `buffer`. kDataLoss when the file ends before.
  virtual absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const = 0;
};

// The kind of an entry of a folder. A link is kOther, whatever it points to.
enum class EntryKind { kFile, kDirectory, kOther };

// What checkpoints need of a file system, and its promises about a power cut: content is safe after
// WritableFile::Sync(), names (creation, renaming, removal) after SyncDirectory() of the folder
// that holds them; what is not synced may survive or not, in any combination.
//
// Errors: kNotFound, kAlreadyExists, kPermissionDenied (also a read-only file system),
// kResourceExhausted (space, quota, descriptors), kFailedPrecondition (not a directory, directory
// not empty, not a plain file, a link on the way), else kInternal. Messages name the path and the
// system's reason.
//
// Links. OpenFile() follows links. No other call follows a link below the root of the checkpoints:
// a link on the way to the last name is kFailedPrecondition, and the last name itself is never
// resolved. The root and the folders above it may be links. An implementation says how it knows the
// root.
//
// Safe for concurrent use.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Only of files that do not exist yet.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> CreateFile(const std::string& path) = 0;
  // Only of plain files. Never blocks on what is not one.
  virtual absl::StatusOr<std::unique_ptr<ReadableFile>> OpenFile(const std::string& path) = 0;

  // The parent must exist.
  virtual absl::Status MakeDirectory(const std::string& path) = 0;
  // The kind of the entry itself. kNotFound: there is none.
  virtual absl::StatusOr<EntryKind> KindOf(const std::string& path) = 0;
  // The names in it, in no order, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) = 0;
  virtual absl::Status SyncDirectory(const std::string& path) = 0;

  // Atomic. Never replaces: kAlreadyExists.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // Atomic. Replaces the file `to`.
  virtual absl::Status ReplaceFile(const std::string& from, const std::string& to) = 0;

  // Of what is not a folder. Removes a link, never the file that the link points to.
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  // Only when empty.
  virtual absl::Status RemoveDirectory(const std::string& path) = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_H_
