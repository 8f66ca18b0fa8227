#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_STORED_CHECKPOINT_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_STORED_CHECKPOINT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/format/manifest.h"

namespace ddp::elastic {

// The checkpoint in one folder, for tools that look at checkpoints from outside of a job. The
// folder may have any name: a user may have copied it. Only a name of a checkpoint must fit the
// manifest.

// Returns the last name of `path`.
std::string BaseName(const std::string& path);

// Returns the text of the manifest in `folder`. Errors: kDataLoss when there is none or it is too
// long; those of the file system, kNotFound when there is no such folder.
absl::StatusOr<std::string> ReadManifestText(FileSystem& file_system, const std::string& folder);

// Returns the manifest of the checkpoint in `folder`. Errors, which name the path: those of
// ReadManifestText() and ParseManifest(); kDataLoss when it is the manifest of another checkpoint
// than the folder's name says.
absl::StatusOr<Manifest> ReadManifestOf(FileSystem& file_system, const std::string& folder);

// Returns the bytes of all files that the manifest lists.
uint64_t BytesOf(const Manifest& manifest);

// Returns "model", "optimizer" or "extra": the part of the state that a file of a checkpoint holds,
// by the file's name.
std::string PartOf(const std::string& file);

// Resolves the argument of a tool: the folder of one checkpoint, or of all, whose newest checkpoint
// is then meant. Returns the path of the checkpoint's folder. A folder with MANIFEST.json, or with
// the name of a checkpoint, is a checkpoint. Errors: kNotFound when there is no such folder or no
// checkpoint in it, and those of the file system.
absl::StatusOr<std::string> FindCheckpoint(FileSystem& file_system, std::string path);

// Returns the paths of all checkpoints that `path` means, newest first. As FindCheckpoint().
absl::StatusOr<std::vector<std::string>> FindCheckpoints(FileSystem& file_system, std::string path);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_STORED_CHECKPOINT_H_
