#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_STORE_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_STORE_GROUP_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"
#include "base/clock.h"
#include "elastic/checkpoint/group/checkpoint_group.h"

namespace ddp::elastic {

// A CheckpointGroup over a c10d::Store. An attempt is one save or restore. It has one or more
// rounds; each round is one call of Decide(). All ranks make the same attempts, so each rank counts
// them by itself. The keys of an attempt contain the group's number and the attempt's: a rank that
// is late for an attempt never reads or writes keys of the next one.
//
// Rank 0 waits for the keys of all ranks together, and reads them with one multiGet() where the
// store has it. A rank deletes a key once it knows that no rank reads it any more. The last
// answer and the counters stay in the store. A deletion that fails is tried again in later rounds,
// and is no error of Decide().
//
// A rank whose Decide() fails sets its error in place of its text, for this round and the next.
// Rank 0 then fails with that error too, and answers the other ranks with it: no rank waits for a
// rank that has left the attempt. Rank 0 does the same with its answer. When the store refuses the
// error too, a thread of its own tries again for half of Options::timeout: this rank goes on.
//
// Patience::kShort bounds each call of the store by Options::store_patience, and so the time until
// a rank notices that the store is gone by twice as much. Thread-compatible.
class StoreGroup final : public CheckpointGroup {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int world_size = 1;
    std::string prefix;  // of all keys; equal on all ranks. Two groups at the same time need two.
    absl::Duration timeout;                            // of one wait without progress of any rank
    absl::Duration store_patience = absl::Seconds(5);  // with Patience::kShort
    // Called every few seconds in a wait while other ranks progress, and before this rank sets an
    // error. Null: no calls.
    std::function<void()> on_progress = nullptr;
    const Clock* clock = nullptr;  // must outlive the group; null: the monotonic clock
  };

  explicit StoreGroup(Options options);
  ~StoreGroup() override;

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }

  void StartAttempt(Patience patience) override;
  void Progress() override;

  // Tells the others.
  void Leave(const absl::Status& error) override;

  // See CheckpointGroup. Exceptions of the store become kUnavailable. kDeadlineExceeded: the store
  // answers, and the others have made no progress for `timeout`.
  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override;

  // From now on this rank waits for others without progress for Options::store_patience at most:
  // they may never come. Also ends a wait in progress, within 5 s more. Any thread.
  void Hurry() { hurries_ = true; }

  // Returns OK when the store answers this rank within Options::store_patience. No collective.
  absl::Status Probe();

 private:
  absl::Time Now() const;
  std::string AttemptKey(const std::string& name) const;
  std::string RoundKey(int64_t round, const std::string& name) const;
  std::string ValueKey(int64_t round, int rank) const;
  std::string InstanceKey() const;
  std::string OwnKey(int64_t round) const;
  c10d::Store& Hasty();
  void StartInstance();
  absl::StatusOr<std::string> Exchange(const std::string& value, const Decision& decide);
  absl::StatusOr<std::string> Lead(const std::string& value, const Decision& decide);
  absl::StatusOr<std::string> Follow(const std::string& value);
  absl::Status Await(const std::vector<std::string>& keys);
  std::vector<std::string> Read(const std::vector<std::string>& keys);
  void Set(const std::string& key, const std::string& text);
  void Tell(const absl::Status& error);
  bool TrySetError(const std::string& text);
  absl::Status Unreachable(const std::exception& error) const;
  void EndTelling();
  void DeleteStaleKeys();
  std::string Missing();

  const Options options_;
  const MonotonicClock monotonic_clock_;
  c10::intrusive_ptr<c10d::Store> hasty_;  // a clone with a short timeout; null: not made yet
  Patience patience_ = Patience::kLong;    // of the attempt
  c10d::Store* store_ = nullptr;           // hasty_ or Options::store, as the attempt wants
  std::thread teller_;                     // sets this rank's error as soon as the store takes it
  std::atomic<bool> telling_ends_ = false;
  std::atomic<bool> hurries_ = false;
  int64_t wanted_instance_ = 0;  // the value for instance_; 0: not known yet
  int64_t instance_ = 0;  // the number of this group among those of its prefix; 0: not stored yet
  int64_t attempt_ = 0;   // of this group; 0: none has begun
  int64_t round_ = 0;     // of the attempt
  bool failed_ = false;   // true: the attempt has failed
  absl::Time told_ = absl::InfinitePast();  // the last progress that this rank reported
  std::vector<std::string> stale_keys_;     // this rank's keys that no rank reads in a later round
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_STORE_GROUP_H_
