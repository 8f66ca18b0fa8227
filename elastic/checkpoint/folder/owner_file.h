#ifndef DDP_ELASTIC_CHECKPOINT_FOLDER_OWNER_FILE_H_
#define DDP_ELASTIC_CHECKPOINT_FOLDER_OWNER_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"

namespace ddp::elastic {

// Reads and takes claims on a folder of checkpoints, for writers that share only its file system.
// Thread-compatible.
//
//   root/.owner                 the settled claim: a number and the owner
//   root/.owner.000000000007    claim 7 while its writer settles it
//   root/.owner-<nonce>         the text of a claim while its writer writes it
//
// The claim with the highest number is in force. No number is used twice: a writer gets a number by
// a rename that never replaces. A writer that is suspended at any point therefore cannot undo a
// later claim:
//   1. The writer reads the claim in force, N, and asks MayFollow().
//   2. The writer renames its claim to .owner.<N+1>. If that name exists, another writer was
//      faster, and the writer restarts at 1.
//   3. The writer reads the claim in force again. If that is another claim, the writer removes its
//      own and restarts at 1.
//   4. The writer removes every unsettled claim with a lower number.
//   5. The writer renames its claim to .owner. If its claim is gone, a later writer removed it in
//      step 4, and the writer restarts at 1.
// Step 5 never replaces a later claim M. This writer saw no M in step 3, so M's writer runs its
// step 4 after this writer's step 2. If that step 4 comes before this writer's step 5, it removes
// this claim, and step 5 fails. Else M's writer runs its own step 5 later and replaces this claim.
//
// Links, folders and other entries that are not plain files are not claims. Such an entry with the
// name .owner is an error of every method: kFailedPrecondition.
class OwnerFile {
 public:
  // `file_system` must outlive this.
  OwnerFile(FileSystem* file_system, std::string root);

  struct Claim {
    int64_t number = 0;  // 0: from a version without numbers, or from an unreadable text
    CheckpointOwner owner;
  };

  // Returns the claim in force. kNotFound when there is none. kUnavailable when the claims change
  // during every one of many reads.
  absl::StatusOr<Claim> Current() const;

  // Makes `owner` the owner, durably, and returns its claim. Returns the claim in force when that
  // is the owner's already. Errors: kFailedPrecondition when MayFollow() refuses; kUnavailable when
  // the claims change during every one of many tries.
  absl::StatusOr<Claim> Take(const CheckpointOwner& owner);

  // Returns OK when `claim` is in force. Errors: kFailedPrecondition when another claim is;
  // kNotFound when the folder was emptied.
  absl::Status Check(const Claim& claim) const;

  // Removes the plain file `name` of the root, such as a claim's text. Any other kind of entry
  // stays. Succeeds when there is no such file.
  absl::Status Remove(const std::string& name);

 private:
  enum class Outcome { kSettled, kLost };

  std::string Path(const std::string& name) const;
  absl::StatusOr<Claim> Read(const std::string& name) const;
  absl::StatusOr<Outcome> Settle(const Claim& claim);
  absl::StatusOr<Outcome> SettleOwn(const Claim& claim);
  absl::Status RemoveUnsettled(int64_t below);

  FileSystem* const file_system_;
  const std::string root_;
};

// Returns true when `name` is the name of a claim's text while its writer writes it.
bool IsClaimText(const std::string& name);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FOLDER_OWNER_FILE_H_
