#ifndef DDP_ELASTIC_CHECKPOINT_OWNER_FILE_H_
#define DDP_ELASTIC_CHECKPOINT_OWNER_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/checkpoint/checkpoint_owner.h"
#include "elastic/checkpoint/file_system.h"

namespace ddp::elastic {

// The claims on a folder of checkpoints, for writers that share nothing but its file system.
//
//   root/.owner                 the settled claim: a number and the owner
//   root/.owner.000000000007    claim 7 while its writer settles it
//   root/.owner-<nonce>         the text of a claim while its writer writes it
//
// The claim of the highest number is in force. A number is given once: a writer gets it by a rename
// that never replaces. So a writer that stood still at any point cannot undo a later claim:
//   1. The writer reads the claim in force, N, and asks MayFollow().
//   2. The writer puts its claim at .owner.<N+1>. The name is taken: another writer was faster, and
//      the writer begins again at 1.
//   3. The writer reads the claim in force once more. It is another one: the writer withdraws its
//      own and begins again at 1.
//   4. The writer removes every unsettled claim of a lower number.
//   5. The writer renames its claim to .owner. Its claim is gone: a later writer removed it in
//      step 4, and the writer begins again at 1.
// Why step 5 never replaces a later claim M: M's writer made .owner.<M> before its step 4. This
// writer's step 3 came after its step 2 and saw no M, so step 4 of M's writer comes later and
// removes this claim; or this claim's step 5 came before, and then M's step 5 replaces it.
//
// Links, folders and other things under these names are no claims.
//
// Thread-compatible.
class OwnerFile {
 public:
  // `file_system` must outlive this.
  OwnerFile(FileSystem* file_system, std::string root);

  struct Claim {
    int64_t number = 0;  // 0: of a version that did not number claims, or of no legible text
    CheckpointOwner owner;
  };

  // The claim in force. kNotFound: there is none.
  absl::StatusOr<Claim> Current() const;

  // Makes `owner` the owner, durably, and returns its claim: the one in force where that is its own
  // already. kFailedPrecondition: MayFollow() refuses it.
  absl::StatusOr<Claim> Take(const CheckpointOwner& owner);

  // OK: `claim` is in force. kFailedPrecondition: another one is. kNotFound: the folder was
  // emptied.
  absl::Status Check(const Claim& claim) const;

 private:
  enum class Outcome { kSettled, kLost };

  std::string Path(const std::string& name) const;
  absl::StatusOr<Claim> Read(const std::string& name) const;
  absl::StatusOr<Outcome> Settle(const Claim& claim);
  absl::StatusOr<Outcome> SettleOwn(const Claim& claim);
  absl::Status RemoveUnsettled(int64_t below);
  absl::Status Remove(const std::string& name);

  FileSystem* const file_system_;
  const std::string root_;
};

// Whether `name` is the name that the text of a claim has while its writer writes it.
bool IsClaimText(const std::string& name);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_OWNER_FILE_H_
