// Free of LibTorch.
#ifndef DDP_TESTING_FAKE_GROUP_STORE_H_
#define DDP_TESTING_FAKE_GROUP_STORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/comm/meeting/group_store.h"

namespace ddp::testing {

// A GroupStore in memory. Clones share the keys. The store can be lost, and it records the threads
// that call it. Thread-safe.
class FakeGroupStore : public ::ddp::internal::GroupStore {
 public:
  FakeGroupStore() : shared_(std::make_shared<Shared>()) {}

  // Every later call throws while `lost` is true, and a wait in progress throws at once.
  void SetLost(bool lost) {
    MutexLock lock(shared_->mutex);
    shared_->lost = lost;
    shared_->changed.NotifyAll();
  }

  // Forgets the recorded threads.
  void ForgetCallers() {
    MutexLock lock(shared_->mutex);
    shared_->callers.clear();
  }

  // Returns the threads that have used the keys of this store or of a clone.
  std::set<std::thread::id> Callers() const {
    MutexLock lock(shared_->mutex);
    return shared_->callers;
  }

  // Returns the number of calls so far.
  int64_t Commands() const {
    MutexLock lock(shared_->mutex);
    return shared_->commands;
  }

  // Returns the keys that exist. Records no caller.
  std::vector<std::string> Keys() const {
    MutexLock lock(shared_->mutex);
    std::vector<std::string> keys;
    for (const auto& [key, value] : shared_->values) keys.push_back(key);
    return keys;
  }

  std::shared_ptr<GroupStore> Clone() override { return std::make_shared<FakeGroupStore>(*this); }
  void SetTimeout(absl::Duration) override {}

  void Set(const std::string& key, const std::string& value) override { SetAll({key}, value); }

  void SetAll(const std::vector<std::string>& keys, const std::string& value) override {
    MutexLock lock(shared_->mutex);
    shared_->Enter();
    for (const std::string& key : keys) shared_->values[key] = value;
    shared_->changed.NotifyAll();
  }

  std::string SetIfNew(const std::string& key, const std::string& value) override {
    MutexLock lock(shared_->mutex);
    shared_->Enter();
    shared_->changed.NotifyAll();
    return shared_->values.try_emplace(key, value).first->second;
  }

  int64_t Add(const std::string& key, int64_t value) override {
    MutexLock lock(shared_->mutex);
    shared_->Enter();
    std::string& text = shared_->values[key];
    int64_t sum = 0;
    if (!text.empty() && !absl::SimpleAtoi(text, &sum)) throw std::runtime_error("no number");
    sum += value;
    text = absl::StrCat(sum);
    shared_->changed.NotifyAll();
    return sum;
  }

  bool Has(const std::vector<std::string>& keys) override {
    MutexLock lock(shared_->mutex);
    shared_->Enter();
    for (const std::string& key : keys) {
      if (shared_->values.count(key) == 0) return false;
    }
    return true;
  }

  std::string Get(const std::string& key) override { return GetAll({key}).front(); }

  std::vector<std::string> GetAll(const std::vector<std::string>& keys) override {
    MutexLock lock(shared_->mutex);
    shared_->Enter();
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(shared_->values.at(key));
    return values;
  }

  void Delete(const std::string& key) override {
    MutexLock lock(shared_->mutex);
    shared_->Enter();
    shared_->values.erase(key);
  }

  bool Wait(const std::string& key, absl::Duration timeout) override {
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + timeout;
    MutexLock lock(shared_->mutex);
    shared_->Enter();
    while (shared_->values.count(key) == 0) {
      const absl::Duration left = deadline - clock.Now();
      if (left <= absl::ZeroDuration()) return false;
      shared_->changed.WaitFor(shared_->mutex, left);
      shared_->ThrowIfLost();
    }
    return true;
  }

 private:
  struct Shared {
    Mutex mutex;
    CondVar changed;
    std::map<std::string, std::string> values ABSL_GUARDED_BY(mutex);
    std::set<std::thread::id> callers ABSL_GUARDED_BY(mutex);
    bool lost ABSL_GUARDED_BY(mutex) = false;
    int64_t commands ABSL_GUARDED_BY(mutex) = 0;

    void Enter() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      callers.insert(std::this_thread::get_id());
      ++commands;
      ThrowIfLost();
    }
    void ThrowIfLost() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      if (lost) throw std::runtime_error("the fake store is lost");
    }
  };

  std::shared_ptr<Shared> shared_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FAKE_GROUP_STORE_H_
