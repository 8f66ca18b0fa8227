#ifndef DDP_MODEL_REPLICA_DRIFT_H_
#define DDP_MODEL_REPLICA_DRIFT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ddp::internal {

// Describes how the ranks' parameters differ: the first parameter that does, the ranks whose values
// are not those of most ranks (where there is no most: of the lowest rank), and how many parameters
// differ. `hashes` holds one hash for each name, rank after rank. Returns "" when all are equal:
//   encoder.weight has other values on rank 2 than on ranks 0, 1, 3; 2 of 12 parameters differ
std::string DescribeDrift(const std::vector<std::string>& names, std::span<const int64_t> hashes);

}  // namespace ddp::internal

#endif  // DDP_MODEL_REPLICA_DRIFT_H_
