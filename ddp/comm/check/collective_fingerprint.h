#ifndef DDP_COMM_CHECK_COLLECTIVE_FINGERPRINT_H_
#define DDP_COMM_CHECK_COLLECTIVE_FINGERPRINT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp::internal {

// The properties of a rank's next collective that must be equal on all ranks, the purpose (`what`)
// included. A plain value. Ranks exchange it as text through the store (see CollectiveCheck).
struct CollectiveFingerprint {
  std::string operation;  // "all-reduce (sum)"
  std::string what;       // "the all-reduce of gradient bucket 3"
  std::string dtype;      // "Float"
  std::vector<int64_t> shape;
  std::string layout;  // "Strided"
  std::string device;  // the type: "cpu"
  int64_t root = -1;   // rank, of a broadcast; -1 for other collectives

  std::string Serialize() const;
  // Returns nullopt when `text` is not the result of Serialize().
  static std::optional<CollectiveFingerprint> Parse(const std::string& text);

  // Returns "all-reduce (sum) of a Float tensor of shape [2, 3] on cpu (the all-reduce of ...)".
  std::string Describe() const;
};

// Compares the fingerprints of all ranks, by rank, for collective number `sequence`. Returns an
// empty text when they are equal, and otherwise the error that every rank throws. The error shows
// the version of most ranks (in a tie, of the lowest rank). It then shows every other version, with
// its ranks and the properties that differ.
std::string CompareFingerprints(int64_t sequence,
                                const std::vector<CollectiveFingerprint>& fingerprints);

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_COLLECTIVE_FINGERPRINT_H_
