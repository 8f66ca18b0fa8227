#include "ddp/comm/meeting/group_store.h"

namespace ddp::internal {

std::vector<std::optional<std::string>> GroupStore::GetPresent(
    const std::vector<std::string>& keys) {
  std::vector<std::optional<std::string>> found(keys.size());
  std::vector<std::string> present;
  std::vector<size_t> places;
  const bool all = Has(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!all && !Has({keys[i]})) continue;
    present.push_back(keys[i]);
    places.push_back(i);
  }
  const std::vector<std::string> values = GetAll(present);
  for (size_t i = 0; i < values.size(); ++i) found[places[i]] = values[i];
  return found;
}

}  // namespace ddp::internal
