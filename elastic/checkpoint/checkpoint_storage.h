#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINT_STORAGE_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINT_STORAGE_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/checkpoint_id.h"
#include "elastic/checkpoint/checkpoint_owner.h"
#include "elastic/checkpoint/content_hash.h"
#include "elastic/checkpoint/file_system.h"
#include "elastic/checkpoint/manifest.h"
#include "elastic/checkpoint/owner_file.h"
#include "elastic/checkpoint/safetensors_reader.h"

namespace ddp::elastic {

// The folder of a job's checkpoints: what may be done to it, in which order, so that at every
// moment each checkpoint in it is whole or detectably not.
//
//   root/.owner                                    the owner: see OwnerFile
//   root/.tmp-step-000000001200.g0007.<nonce>/     being written, or left behind
//   root/.del-step-000000001200.g0007.<nonce>/     being removed
//   root/step-000000001200.g0007/                  committed: appears by one rename
//
// Writing: Begin() on the coordinator; files into the folder it returns, by any process, each file
// synced and then the folder; Commit() on the coordinator. The rename in Commit() is the only
// moment at which the checkpoint comes into being; nothing is ever written into a committed folder.
//
// Fencing: the first Begin() of an owner claims the folder (OwnerFile) and removes the work folders
// that it saw before its claim. Those belong to earlier claims, so a claimant that stood still
// never removes the folder of a later one. From then on every Begin() and Commit() of an earlier
// claim fails: OwnerFile names another claim, or its work folder was renamed. An older generation
// of the same job cannot claim. Begin() and Commit() also ask the rendezvous, where there is one:
// a generation that is over is refused before any claim is made.
//
// Removing: only folders with the exact name of a WorkFolder, in them only plain files with the
// names of a save (IsCheckpointFile), and the folder once it is empty. Links, foreign files and
// folders, and every other entry stay; the log names each once.
//
// Errors are those of FileSystem, with kFailedPrecondition also for a lost fence and kDataLoss for
// damaged files. Thread-compatible.
class CheckpointStorage {
 public:
  // `file_system` must outlive this. `ask`: may be null.
  CheckpointStorage(FileSystem* file_system, std::string root, AskRendezvous ask = nullptr);

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

  // The writer that claimed the folder last. kNotFound: none has, or there is no folder.
  absl::StatusOr<CheckpointOwner> Owner() const;

  // Whether there is no file `path` in the root.
  bool IsMissing(const std::string& path) const;

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
  absl::Status Claim(CheckpointOwner owner);
  absl::Status CheckGeneration(CheckpointOwner& owner);
  absl::Status CheckOwner(const CheckpointOwner& owner) const;
  absl::Status MakeWorkFolder(const std::string& name);
  void RemoveLeftovers(const std::vector<std::string>& names);
  absl::Status Retire(const std::string& name);
  absl::Status RemoveFolder(const std::string& path);
  struct Contents {
    std::vector<std::string> files;    // of a save, the manifest first
    std::vector<std::string> foreign;  // everything else
  };
  absl::StatusOr<Contents> LookInto(const std::string& path) const;
  void NameOnce(const std::string& path, const std::string& reason);
  absl::Status CheckWhole(const Manifest& manifest) const;
  absl::Status CheckWritten(const std::string& folder, const Manifest& manifest) const;
  absl::StatusOr<bool> YieldToExisting(const Manifest& manifest);

  FileSystem* const file_system_;
  const std::string root_;
  const AskRendezvous ask_;
  OwnerFile owner_file_;
  std::optional<OwnerFile::Claim> claim_;  // the last one that Begin() made
  std::set<std::string> named_;            // paths that the log has named
  bool rendezvous_is_silent_ = false;      // the log has said so
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINT_STORAGE_H_
