#include "ddp/comm/meeting/c10d_group_store.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/clock.h"

namespace ddp::internal {
namespace {

// Bounds the time until a wait notices that the store is lost, and with it the end of a group.
constexpr absl::Duration kWaitSlice = absl::Seconds(5);

bool IsTcpStore(c10::intrusive_ptr<c10d::Store> store) {
  auto* const prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (prefix != nullptr) store = prefix->getUnderlyingNonPrefixStore();
  return dynamic_cast<c10d::TCPStore*>(store.get()) != nullptr;
}

class C10dGroupStore : public GroupStore {
 public:
  explicit C10dGroupStore(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)), is_tcp_store_(IsTcpStore(store_)) {}

  std::shared_ptr<GroupStore> Clone() override { return MakeGroupStore(store_->clone()); }

  void SetTimeout(absl::Duration timeout) override {
    store_->setTimeout(absl::ToChronoMilliseconds(timeout));
  }

  void Set(const std::string& key, const std::string& value) override { store_->set(key, value); }

  void SetAll(const std::vector<std::string>& keys, const std::string& value) override {
    const std::vector<uint8_t> bytes(value.begin(), value.end());
    if (store_->hasExtendedApi()) {
      store_->multiSet(keys, std::vector<std::vector<uint8_t>>(keys.size(), bytes));
    } else {
      for (const std::string& key : keys) store_->set(key, bytes);
    }
  }

  std::string SetIfNew(const std::string& key, const std::string& value) override {
    return store_->compareSet(key, std::string(), value);
  }

  int64_t Add(const std::string& key, int64_t value) override { return store_->add(key, value); }

  bool Has(const std::vector<std::string>& keys) override { return store_->check(keys); }

  std::string Get(const std::string& key) override { return store_->get_to_str(key); }

  std::vector<std::string> GetAll(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    if (!keys.empty() && store_->hasExtendedApi()) {
      for (const std::vector<uint8_t>& value : store_->multiGet(keys)) {
        values.emplace_back(value.begin(), value.end());
      }
    } else {
      for (const std::string& key : keys) values.push_back(store_->get_to_str(key));
    }
    return values;
  }

  void Delete(const std::string& key) override { store_->deleteKey(key); }

  // Waits in slices, with a command between them: a lost store of Redis looks like a wait that
  // timed out, and throws at the next command. A TCPStore throws at once when it is lost, and logs
  // two warnings for each wait that times out, so it gets one slice.
  bool Wait(const std::string& key, absl::Duration timeout) override {
    for (absl::Duration left = timeout;; left -= kWaitSlice) {
      const absl::Duration slice = is_tcp_store_ ? left : std::min(left, kWaitSlice);
      if (WaitOnce(key, slice)) return true;
      if (slice == left) return false;
      if (store_->check({key})) return true;
    }
  }

 private:
  // The type of c10d's exception does not say whether the store is lost or the wait timed out, but
  // the time does.
  bool WaitOnce(const std::string& key, absl::Duration timeout) {
    const std::chrono::milliseconds limit =
        std::max(absl::ToChronoMilliseconds(timeout), std::chrono::milliseconds(1));
    const int64_t start_ns = MonotonicNanoseconds();
    try {
      store_->wait({key}, limit);
      return true;
    } catch (const std::exception&) {
      const absl::Duration waited = absl::Nanoseconds(MonotonicNanoseconds() - start_ns);
      if (waited < absl::FromChrono(limit) * 0.9) throw;
      return false;
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const bool is_tcp_store_;
};

}  // namespace

std::shared_ptr<GroupStore> MakeGroupStore(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_shared<C10dGroupStore>(std::move(store));
}

}  // namespace ddp::internal
