#include "store/redis/server_locator.h"

#include <utility>

#include "base/name_lookup.h"
#include "glog/logging.h"

namespace ddp::store {
namespace {

// Pause between two lookups of the name of a server that is away.
constexpr absl::Duration kNamePause = absl::Seconds(30);

}  // namespace

ServerLocator::ServerLocator(const RedisEndpoint& endpoint, const Options& options)
    : endpoint_(endpoint),
      options_(options),
      has_name_(!endpoint.is_unix() && !IsNumericAddress(endpoint.host)) {
  if (!has_name_) addresses_ = {endpoint.host};
}

void ServerLocator::Reached(const std::string& address) {
  if (address.empty()) return;
  addresses_ = {address};
  next_ = 0;
  name_due_ = absl::InfiniteFuture();
}

void ServerLocator::Lost(absl::Time now) {
  if (name_due_ == absl::InfiniteFuture()) name_due_ = now + kNamePause;
}

void ServerLocator::Doubt() { name_due_ = absl::InfinitePast(); }

void ServerLocator::NameFound(std::vector<std::string> addresses, absl::Time now) {
  CHECK(!addresses.empty());
  addresses_ = std::move(addresses);
  next_ = 0;
  name_due_ = now + kNamePause;
}

void ServerLocator::NameFailed(const absl::Status& why, absl::Time now) {
  name_error_ = why;
  name_due_ = now + (knows_address() ? kNamePause : options_.first_name_pause);
}

RedisEndpoint ServerLocator::NextTarget() {
  CHECK(knows_address());
  RedisEndpoint target = endpoint_;
  target.host = addresses_[next_];
  next_ = (next_ + 1) % addresses_.size();
  return target;
}

}  // namespace ddp::store
