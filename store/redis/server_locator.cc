#include "store/redis/server_locator.h"

#include <algorithm>
#include <utility>

#include "base/name_lookup.h"
#include "glog/logging.h"

namespace ddp::store {
namespace {

constexpr absl::Duration kPauseMin = absl::Seconds(1);
constexpr absl::Duration kPauseMax = absl::Seconds(30);

}  // namespace

ServerLocator::ServerLocator(const RedisEndpoint& endpoint)
    : has_name_(!endpoint.is_unix() && !IsNumericAddress(endpoint.host)),
      longest_pause_(endpoint.is_behind_sentinels() ? kPauseMin : kPauseMax) {
  if (!has_name_) addresses_ = {endpoint.host};
}

void ServerLocator::Reached(const std::string& address) {
  is_sought_ = false;
  pause_ = std::min(pause_, kPauseMin);
  if (!has_name_ || address.empty()) return;
  reached_ = address;
  if (doubted_ == address) doubted_.clear();
  if (std::count(addresses_.begin(), addresses_.end(), address) == 0) addresses_.push_back(address);
  PutInOrder();
}

void ServerLocator::Doubt() {
  is_sought_ = true;
  pause_ = std::min(pause_, kPauseMin);
  if (reached_.empty()) return;
  doubted_ = std::exchange(reached_, "");
  PutInOrder();
}

void ServerLocator::NameFound(std::vector<std::string> addresses, absl::Time now) {
  CHECK(!addresses.empty());
  addresses_ = std::move(addresses);
  PutInOrder();
  NoteLookup(now);
}

void ServerLocator::NameFailed(const absl::Status& why, absl::Time now) {
  name_error_ = why;
  NoteLookup(now);
}

void ServerLocator::NoteLookup(absl::Time now) {
  last_lookup_ = now;
  pause_ = knows_address() ? std::clamp(2 * pause_, kPauseMin, longest_pause_) : kPauseMin;
}

void ServerLocator::PutInOrder() {
  const auto rank = [&](const std::string& address) {
    return address == reached_ ? 0 : address == doubted_ ? 2 : 1;
  };
  std::stable_sort(addresses_.begin(), addresses_.end(),
                   [&](const std::string& a, const std::string& b) { return rank(a) < rank(b); });
}

}  // namespace ddp::store
