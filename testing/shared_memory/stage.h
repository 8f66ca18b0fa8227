// Memory that the processes of a test share: a store, the groups to build, and the members'
// reports.
#ifndef DDP_TESTING_SHARED_MEMORY_STAGE_H_
#define DDP_TESTING_SHARED_MEMORY_STAGE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/host_group/futex.h"
#include "ddp/comm/meeting/group_store.h"

namespace ddp::internal {

// All members are atomics or are written before `changes` is raised. A process that is killed at
// any instruction leaves the stage usable: nothing in it is locked.
struct Stage {
  static constexpr int kSlots = 8;         // processes
  static constexpr int kGenerations = 16;  // groups, one after the other
  static constexpr int kEntries = 512;

  // One Set(). The last entry of a key that is ready is the value.
  struct Entry {
    std::atomic<uint32_t> ready;
    char key[60];
    char value[320];
  };
  // A group to build. `member_of[slot]` is -1 when the process has no part in it.
  struct Plan {
    int32_t size = 0;
    int32_t timeout_ms = 0;  // of the entry
    uint64_t seed = 0;       // of its collectives
    std::array<int32_t, kSlots> member_of = {};
  };
  // The report of a process about its part in a group. The times are CLOCK_MONOTONIC; 0: not yet.
  struct Report {
    std::atomic<int64_t> built_ns;   // after the first barrier
    std::atomic<int64_t> failed_ns;  // the entry, or a collective
    std::atomic<uint32_t> operations;
    std::atomic<uint32_t> corrupt;  // results that were wrong
    int32_t end_kind = 0;
    int32_t end_member = -1;
    int32_t code = 0;
    char message[256] = {};
  };

  std::atomic<uint32_t> changes;      // a futex, for all that follows
  std::atomic<uint32_t> generations;  // the plans that are written
  std::atomic<uint32_t> next_entry;
  std::array<uint64_t, kSlots> ballast_bytes = {};
  std::array<std::atomic<uint32_t>, kSlots> ready;  // the process has its ballast
  std::array<Plan, kGenerations> plans = {};
  Report reports[kGenerations][kSlots];
  Entry entries[kEntries];

  void Changed() {
    changes.fetch_add(1);
    FutexWake(changes);
  }

  // Blocks until `done()`, which reads this stage. False: `timeout` has passed.
  template <typename Done>
  bool Await(const Done& done, absl::Duration timeout) {
    const int64_t until = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(timeout);
    while (true) {
      const uint32_t seen = changes.load();
      if (done()) return true;
      const int64_t left = until - MonotonicNanoseconds();
      if (left <= 0) return false;
      FutexWait(changes, seen, absl::Nanoseconds(left));
    }
  }

  // Makes a stage, or maps the one of `fd`. The mapping stays for ever.
  static Stage* Map(int fd) {
    void* const memory = ::mmap(nullptr, sizeof(Stage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<Stage*>(memory);
  }
  // The descriptor goes to processes that this one executes.
  static Stage* Make(int* fd) {
    *fd = ::memfd_create("stage", 0);
    if (*fd < 0 || ::ftruncate(*fd, sizeof(Stage)) != 0) return nullptr;
    Stage* const stage = Map(*fd);
    return stage == nullptr ? nullptr : new (stage) Stage();
  }
};

// The store of one group, for the processes of a stage. Thread-safe.
class StageStore final : public GroupStore {
 public:
  StageStore(Stage* stage, uint32_t generation) : stage_(stage), generation_(generation) {}

  std::shared_ptr<GroupStore> Clone() override { return std::make_shared<StageStore>(*this); }
  void SetTimeout(absl::Duration) override {}

  void Set(const std::string& key, const std::string& value) override {
    const uint32_t index = stage_->next_entry.fetch_add(1);
    if (index >= Stage::kEntries) throw std::runtime_error("the stage is full");
    Stage::Entry& entry = stage_->entries[index];
    Full(key).copy(entry.key, sizeof entry.key - 1);
    value.copy(entry.value, sizeof entry.value - 1);
    entry.ready.store(1);
    stage_->Changed();
  }
  void SetAll(const std::vector<std::string>& keys, const std::string& value) override {
    for (const std::string& key : keys) Set(key, value);
  }
  bool Has(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) {
      if (Find(key) == nullptr) return false;
    }
    return true;
  }
  std::string Get(const std::string& key) override {
    const Stage::Entry* const entry = Find(key);
    if (entry == nullptr) throw std::runtime_error("no such key");
    return entry->value;
  }
  std::vector<std::string> GetAll(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(Get(key));
    return values;
  }
  bool Wait(const std::string& key, absl::Duration timeout) override {
    return stage_->Await([&] { return Find(key) != nullptr; }, timeout);
  }

  // A group's entry needs none of these.
  std::string SetIfNew(const std::string&, const std::string&) override { Refuse(); }
  int64_t Add(const std::string&, int64_t) override { Refuse(); }
  void Delete(const std::string&) override { Refuse(); }

 private:
  [[noreturn]] static void Refuse() { throw std::logic_error("not of a StageStore"); }
  std::string Full(const std::string& key) const { return absl::StrCat(generation_, "/", key); }

  const Stage::Entry* Find(const std::string& key) const {
    const std::string full = Full(key);
    const uint32_t count =
        std::min<uint32_t>(stage_->next_entry.load(), static_cast<uint32_t>(Stage::kEntries));
    for (uint32_t i = count; i > 0; --i) {
      const Stage::Entry& entry = stage_->entries[i - 1];
      if (entry.ready.load() != 0 && full == entry.key) return &entry;
    }
    return nullptr;
  }

  Stage* const stage_;
  const uint32_t generation_;
};

}  // namespace ddp::internal

#endif  // DDP_TESTING_SHARED_MEMORY_STAGE_H_
