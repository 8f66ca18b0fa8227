#ifndef DDP_COMM_COLLECTIVE_FINGERPRINT_H_
#define DDP_COMM_COLLECTIVE_FINGERPRINT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp::internal {

// What one rank is about to run: the things about a collective in which all ranks must agree.
struct CollectiveFingerprint {
  std::string operation;  // "all-reduce (sum)"
  std::string what;       // "the all-reduce of gradient bucket 3"
  std::string dtype;      // "Float"
  std::vector<int64_t> shape;
  std::string layout;  // "Strided"
  std::string device;  // the type: "cpu"
  int64_t root = -1;   // of a broadcast; -1: has none

  std::string Serialize() const;
  // Nullopt: not such a text.
  static std::optional<CollectiveFingerprint> Parse(const std::string& text);

  // "all-reduce (sum) of a Float tensor of shape [2, 3] on cpu (the all-reduce of ...)".
  std::string Describe() const;
};

// Compares what all ranks are about to run as their collective number `sequence`. Empty when they
// agree; else the one text that every rank raises. It shows what most ranks run (the lowest rank's
// wins a tie) and every other version, with the ranks and the aspects that differ.
std::string CompareFingerprints(int64_t sequence,
                                const std::vector<CollectiveFingerprint>& fingerprints);

}  // namespace ddp::internal

#endif  // DDP_COMM_COLLECTIVE_FINGERPRINT_H_
