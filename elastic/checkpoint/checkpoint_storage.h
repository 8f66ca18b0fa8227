#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINT_STORAGE_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINT_STORAGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/checkpoint_id.h"
#include "elastic/checkpoint/content_hash.h"
#include "elastic/checkpoint/file_system.h"
#include "elastic/checkpoint/manifest.h"
#include "elastic/checkpoint/safetensors_reader.h"

namespace ddp::elastic {

// Who writes: the generation of a job. The nonce is unique to it.
struct CheckpointOwner {
  std::string run_id;
  uint64_t generation = 0;
  std::string nonce;  // not empty

  friend bool operator==(const CheckpointOwner&, const CheckpointOwner&) = default;
};

// The folder of a job's checkpoints: what may be done to it, in which order, so that at every
// moment each checkpoint in it is whole or detectably not.
//
//   root/.owner                                    who may commit
//   root/.tmp-step-000000001200.g0007.<nonce>/     being written, or left behind
//   root/step-000000001200.g0007/                  committed: appears by one rename
//
// Writing: Begin() on the coordinator; files into the folder it returns, by any process, each file
// synced and then the folder; Commit() on the coordinator. The rename in Commit() is the only
// moment at which the checkpoint comes into being; nothing is ever written into a committed folder.
//
// Fencing: the first Begin() of an owner writes .owner and removes what others left behind. From
// then on an earlier owner's Commit() fails: its folder is gone, and .owner names somebody else. An
// owner that begins after a later one has begun is not kept out; that is the rendezvous's duty,
// which lets one generation live at a time.
//
// Errors are those of FileSystem, with kFailedPrecondition also for a lost fence and kDataLoss for
// damaged files. Thread-compatible.
class CheckpointStorage {
 public:
  // `file_system` must outlive this.
  CheckpointStorage(FileSystem* file_system, std::string root);

  const std::string& root() const { return root_; }
  std::string Folder(const CheckpointId& id) const;

  // The committed checkpoints, whole or not, newest first. None where there is no folder yet.
  absl::StatusOr<std::vector<CheckpointId>> List() const;

  struct StoredManifest {
    Manifest manifest;
    ContentHash hash;  // of its text
  };
  absl::StatusOr<StoredManifest> ReadManifest(const CheckpointId& id) const;

  // Reads one of the manifest's files and compares every byte with what the manifest says.
  // kDataLoss names the file and, where it can, the tensor.
  absl::StatusOr<LoadedFile> LoadFile(const Manifest& manifest, const FileRecord& file) const;

  // Makes the folder to write checkpoint `id` into, and returns its path.
  absl::StatusOr<std::string> Begin(const CheckpointOwner& owner, const CheckpointId& id);

  // Makes what stands in `writing_folder`, from Begin(), the checkpoint `manifest.id`, and returns
  // its path. When it returns OK the checkpoint survives a power cut. On an error the folder may
  // still be there: Abandon() it. A checkpoint of that id with the same state is as good: its path
  // is returned. One that is not whole makes way. A whole one with another state stays, and the
  // error is kAlreadyExists.
  absl::StatusOr<std::string> Commit(const CheckpointOwner& owner,
                                     const std::string& writing_folder, const Manifest& manifest);

  // Removes `writing_folder` as far as possible.
  void Abandon(const std::string& writing_folder);

 private:
  std::string Path(const std::string& name) const;
  absl::Status MakeRoot();
  absl::Status Claim(const CheckpointOwner& owner);
  absl::Status CheckOwner(const CheckpointOwner& owner) const;
  absl::Status RemoveLeftovers();
  absl::Status RemoveFolder(const std::string& path);
  absl::Status WriteText(const std::string& path, const std::string& text);
  absl::StatusOr<std::string> ReadText(const std::string& path, uint64_t bytes_max) const;
  absl::Status CheckWhole(const Manifest& manifest) const;
  absl::StatusOr<bool> YieldToExisting(const Manifest& manifest);

  FileSystem* const file_system_;
  const std::string root_;
  std::string claimed_nonce_;  // of the owner whose .owner we wrote
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINT_STORAGE_H_
