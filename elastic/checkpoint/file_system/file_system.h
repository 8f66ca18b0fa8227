#ifndef DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_FILE_SYSTEM_H_
#define DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::elastic {

// A file that is written from its start to its end. Thread-compatible. The destructor closes the
// file without reporting errors: call Sync() and Close() first.
class WritableFile {
 public:
  virtual ~WritableFile() = default;

  // Reserves `bytes` of disk for the file, so that a full disk is found before the writing. Returns
  // OK when the file system cannot reserve. Does not change the file's size.
  virtual absl::Status Reserve(uint64_t bytes) = 0;
  virtual absl::Status Append(const char* data, size_t bytes) = 0;

  // Makes the content durable: after OK it survives a power cut. The file's name survives only
  // after SyncDirectory(). After an error the file is lost: a second Sync() may return OK falsely.
  virtual absl::Status Sync() = 0;
  virtual absl::Status Close() = 0;
};

// A file that is read. Threads: any, concurrently.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;

  // Returns the size, in bytes, that the file had when it was opened.
  virtual uint64_t size() const = 0;

  // Reads exactly `bytes` bytes at `offset` into `buffer`. kDataLoss when the file ends before.
  virtual absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const = 0;
};

// A lock on a file. The destructor and the end of the process release it. It keeps nobody from
// using the file: it only shows other holders that the file is in use.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

// Any number of holders share a kShared lock. A kExclusive lock has one holder and no sharers.
enum class LockKind { kShared, kExclusive };

// The kind of an entry of a folder. A link is kOther, whatever it points to.
enum class EntryKind { kFile, kDirectory, kOther };

// The operations of a file system that checkpoints need. Threads: any, concurrently.
//
// Power cuts: content survives after WritableFile::Sync(). Names (creation, renaming, removal)
// survive after SyncDirectory() of their folder. Any subset of the unsynced changes may survive.
//
// Errors: kNotFound, kAlreadyExists, kPermissionDenied (also a read-only file system),
// kResourceExhausted (space, quota, descriptors, memory), kFailedPrecondition (not a directory,
// directory not empty, not a plain file, a link on the way), else kInternal. Messages name the path
// and the system's reason.
//
// Links: OpenFile() follows links. No other call follows a link below the root of the checkpoints:
// a link among the folders of the path is kFailedPrecondition, and a link at its end is not
// followed.
// The root and the folders above it may be links. Each implementation documents how it knows the
// root.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Creates a file. kAlreadyExists when the name is in use.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> CreateFile(const std::string& path) = 0;
  // Opens a plain file. Refuses every other kind of entry, and never blocks on it.
  virtual absl::StatusOr<std::unique_ptr<ReadableFile>> OpenFile(const std::string& path) = 0;

  // Creates a folder. The parent must exist.
  virtual absl::Status MakeDirectory(const std::string& path) = 0;
  // Returns the kind of the entry, without following a link. kNotFound when there is no entry.
  virtual absl::StatusOr<EntryKind> KindOf(const std::string& path) = 0;
  // Returns the names of the folder's entries, unordered, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) = 0;
  virtual absl::Status SyncDirectory(const std::string& path) = 0;

  // Renames atomically. Never replaces an entry: kAlreadyExists.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // Renames atomically and replaces the file `to`.
  virtual absl::Status ReplaceFile(const std::string& from, const std::string& to) = 0;

  // Removes an entry that is not a folder. Removes a link, never the file that the link points to.
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  // Removes an empty folder.
  virtual absl::Status RemoveDirectory(const std::string& path) = 0;

  // Locks a plain file. Never blocks. The lock is one on the file, whatever its name becomes.
  // kUnavailable: another holder, in this process or another one, has a lock that excludes this
  // one. kUnimplemented: the file system has no locks.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> LockFile(const std::string& path,
                                                             LockKind kind) = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_FILE_SYSTEM_H_
