#include "launcher/output/output_options.h"

#include <algorithm>

namespace ddp::launcher {

int StreamMap::Get(int local_rank) const {
  const auto found = by_local_rank.find(local_rank);
  return found == by_local_rank.end() ? all : found->second;
}

bool StreamMap::Contains(Streams stream) const {
  return (all & stream) != 0 ||
         std::any_of(by_local_rank.begin(), by_local_rank.end(),
                     [stream](const auto& entry) { return (entry.second & stream) != 0; });
}

}  // namespace ddp::launcher
