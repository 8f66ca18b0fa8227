// Memory that the processes of a test share: a store, the groups to build, and the members'
// reports.
#ifndef DDP_TESTING_SHARED_MEMORY_STAGE_H_
#define DDP_TESTING_SHARED_MEMORY_STAGE_H_

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
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

// All members are atomics, or are written before `changes` is raised, or under `mutex`, which is
// robust: a process that is killed at any instruction leaves the stage usable.
struct Stage {
  static constexpr int kSlots = 8;         // processes
  static constexpr int kGenerations = 16;  // groups, one after the other
  static constexpr int kEntries = 2048;

  // One change of a key. The last one has the value.
  struct Entry {
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
  std::array<uint64_t, kSlots> ballast_bytes = {};
  std::array<std::atomic<uint32_t>, kSlots> ready;  // the process has its ballast
  std::array<Plan, kGenerations> plans = {};
  Report reports[kGenerations][kSlots];
  pthread_mutex_t mutex;
  uint32_t entry_count = 0;
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
    if (stage == nullptr) return nullptr;
    new (stage) Stage();
    ::pthread_mutexattr_t robust;
    ::pthread_mutexattr_init(&robust);
    ::pthread_mutexattr_setpshared(&robust, PTHREAD_PROCESS_SHARED);
    ::pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
    ::pthread_mutex_init(&stage->mutex, &robust);
    return stage;
  }
};

// The store of one group, for the processes of a stage. Thread-safe.
class StageStore final : public GroupStore {
 public:
  StageStore(Stage* stage, uint32_t generation) : stage_(stage), generation_(generation) {}

  std::shared_ptr<GroupStore> Clone() override { return std::make_shared<StageStore>(*this); }
  void SetTimeout(absl::Duration) override {}

  void Set(const std::string& key, const std::string& value) override {
    (void)Change(key, [&](const Stage::Entry*) { return value; });
  }
  void SetAll(const std::vector<std::string>& keys, const std::string& value) override {
    for (const std::string& key : keys) Set(key, value);
  }
  bool Has(const std::vector<std::string>& keys) override {
    const Lock lock(stage_);
    return std::all_of(keys.begin(), keys.end(),
                       [&](const std::string& key) { return Find(key) != nullptr; });
  }
  std::string Get(const std::string& key) override {
    const Lock lock(stage_);
    const Stage::Entry* const entry = Find(key);
    if (entry == nullptr) throw std::runtime_error("no such key");
    return entry->value;
  }
  std::vector<std::string> GetAll(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(Get(key));
    return values;
  }
  std::string SetIfNew(const std::string& key, const std::string& value) override {
    return Change(key, [&](const Stage::Entry* entry) { return entry ? entry->value : value; });
  }
  int64_t Add(const std::string& key, int64_t value) override {
    return std::stoll(Change(key, [&](const Stage::Entry* entry) {
      return std::to_string((entry ? std::stoll(entry->value) : 0) + value);
    }));
  }
  bool Wait(const std::string& key, absl::Duration timeout) override {
    return stage_->Await([&] { return Has({key}); }, timeout);
  }

  // A group's entry deletes nothing.
  void Delete(const std::string&) override { throw std::logic_error("not of a StageStore"); }

 private:
  // The next process gets the mutex of one that has been killed.
  struct Lock {
    explicit Lock(Stage* stage) : stage(stage) {
      if (::pthread_mutex_lock(&stage->mutex) == EOWNERDEAD) {
        ::pthread_mutex_consistent(&stage->mutex);
      }
    }
    ~Lock() { ::pthread_mutex_unlock(&stage->mutex); }
    Stage* const stage;
  };

  std::string Full(const std::string& key) const { return absl::StrCat(generation_, "/", key); }

  const Stage::Entry* Find(const std::string& key) const {
    const std::string full = Full(key);
    for (uint32_t i = stage_->entry_count; i > 0; --i) {
      if (full == stage_->entries[i - 1].key) return &stage_->entries[i - 1];
    }
    return nullptr;
  }

  // Gives a key the value that `change` returns for the present entry, which may be null.
  template <typename ValueOf>
  std::string Change(const std::string& key, const ValueOf& change) {
    std::string value;
    {
      const Lock lock(stage_);
      value = change(Find(key));
      if (stage_->entry_count >= Stage::kEntries) throw std::runtime_error("the stage is full");
      Stage::Entry& entry = stage_->entries[stage_->entry_count];
      std::memset(&entry, 0, sizeof entry);  // of a process that was killed here
      Full(key).copy(entry.key, sizeof entry.key - 1);
      value.copy(entry.value, sizeof entry.value - 1);
      ++stage_->entry_count;
    }
    stage_->Changed();
    return value;
  }

  Stage* const stage_;
  const uint32_t generation_;
};

}  // namespace ddp::internal

#endif  // DDP_TESTING_SHARED_MEMORY_STAGE_H_
