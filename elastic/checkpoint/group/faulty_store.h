#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_FAULTY_STORE_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_FAULTY_STORE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp::elastic {

// One rank's view of a store that all ranks of a test share. The view throws in the calls that the
// test chooses, as a store does whose connection breaks or whose memory is full. All views of one
// store have the same keys. Thread-safe when `fails` is.
class FaultyStore final : public c10d::PrefixStore {
 public:
  // Returns true when the call must throw. `call`: its name. `key`: its key, or its first one.
  using Fails = std::function<bool(const std::string& call, const std::string& key)>;

  // kBefore: a failing call has no effect. kAfter: it has its effect, and only the reply is lost.
  enum class Throws { kBefore, kAfter };

  FaultyStore(c10::intrusive_ptr<c10d::Store> store, Fails fails, Throws throws = Throws::kBefore)
      : PrefixStore("view", std::move(store)), fails_(std::move(fails)), throws_(throws) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<FaultyStore>(store_->clone(), fails_, throws_);
  }
  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    Run("set", key, [&] { PrefixStore::set(key, value); });
  }
  std::vector<uint8_t> get(const std::string& key) override {
    std::vector<uint8_t> value;
    Run("get", key, [&] { value = PrefixStore::get(key); });
    return value;
  }
  int64_t add(const std::string& key, int64_t value) override {
    int64_t sum = 0;
    Run("add", key, [&] { sum = PrefixStore::add(key, value); });
    return sum;
  }
  bool deleteKey(const std::string& key) override {
    bool deleted = false;
    Run("deleteKey", key, [&] { deleted = PrefixStore::deleteKey(key); });
    return deleted;
  }
  using PrefixStore::wait;
  bool check(const std::vector<std::string>& keys) override {
    bool present = false;
    Run("check", keys.at(0), [&] { present = PrefixStore::check(keys); });
    return present;
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    Run("wait", keys.at(0), [&] { PrefixStore::wait(keys, timeout); });
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    std::vector<std::vector<uint8_t>> values;
    Run("multiGet", keys.at(0), [&] { values = PrefixStore::multiGet(keys); });
    return values;
  }

 private:
  void Run(const std::string& call, const std::string& key, const std::function<void()>& run) {
    const bool fails = fails_(call, key);
    if (!fails || throws_ == Throws::kAfter) run();
    if (fails) throw std::runtime_error("the store fails in " + call + " of " + key);
  }

  const Fails fails_;
  const Throws throws_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_FAULTY_STORE_H_
