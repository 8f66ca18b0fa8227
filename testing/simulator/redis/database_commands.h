#ifndef DDP_TESTING_SIMULATOR_REDIS_DATABASE_COMMANDS_H_
#define DDP_TESTING_SIMULATOR_REDIS_DATABASE_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>

#include "absl/types/span.h"
#include "testing/simulator/redis/command_words.h"
#include "testing/simulator/redis/memory_database.h"

namespace ddp::testing {

// The commands of MemoryDatabase, with access to its private fields. MemoryDatabase::Run() makes
// one object for each call; a member function is one command. The definitions are in
// key_commands.cc (keys, strings, PUBLISH, TIME and INFO), collection_commands.cc (hashes, sets,
// lists) and sorted_set_commands.cc; Table() is in memory_database.cc. Thread-compatible.
struct DatabaseCommands {
  using Entry = MemoryDatabase::Entry;
  using Hash = MemoryDatabase::Hash;
  using Set = MemoryDatabase::Set;
  using SortedSet = MemoryDatabase::SortedSet;
  using List = MemoryDatabase::List;
  using Order = std::set<std::pair<double, std::string>>;
  struct Command {
    void (DatabaseCommands::*run)();
    int arguments;  // number, with the name; negative for a minimum
  };
  static const std::unordered_map<std::string_view, Command>& Table();

  MemoryDatabase& db;
  absl::Span<const std::string_view> args;
  const MemoryDatabase::World& world;
  ReplySink& sink;

  // --- keys

  Entry* FindKey(std::string_view key) {
    const auto found = db.keys_.find(key);
    if (found == db.keys_.end()) return nullptr;
    if (found->second.expires_at_ms != INT64_MAX && found->second.expires_at_ms < now_ms()) {
      db.keys_.erase(found);
      return nullptr;
    }
    return &found->second;
  }

  bool EraseKey(std::string_view key) {
    if (FindKey(key) == nullptr) return false;
    db.keys_.erase(db.keys_.find(key));
    return true;
  }

  // Returns the value of args[1]. Returns null when there is none, and when it has another type;
  // then it has sent the error and set `failed`.
  template <typename T>
  T* Find(bool& failed) {
    failed = false;
    Entry* const entry = FindKey(args[1]);
    if (entry == nullptr) return nullptr;
    T* const value = std::get_if<T>(&entry->value);
    if (value == nullptr) {
      failed = true;
      sink.Error(kWrongType);
    }
    return value;
  }

  template <typename T>
  T* FindOrMake() {
    Entry* entry = FindKey(args[1]);
    if (entry == nullptr) {
      entry = &db.keys_[std::string(args[1])];
      entry->value = T();
    }
    T* const value = std::get_if<T>(&entry->value);
    if (value == nullptr) sink.Error(kWrongType);
    return value;
  }

  // Erases the key args[1] when its container is empty, because Redis keeps no empty containers.
  template <typename T>
  void DropIfEmpty(const T& container) {
    if (container.empty()) db.keys_.erase(db.keys_.find(args[1]));
  }
  void DropIfEmpty(const SortedSet& set) {
    if (set.order.empty()) db.keys_.erase(db.keys_.find(args[1]));
  }

  // Returns the value of args[1]. Returns null after it has sent `absent` (no such key) or an
  // error.
  template <typename T>
  T* FindOrSend(void (*absent)(ReplySink&)) {
    bool failed = false;
    T* const value = Find<T>(failed);
    if (value == nullptr && !failed) absent(sink);
    return value;
  }
  static void SendNil(ReplySink& sink) { sink.Nil(); }
  static void SendZero(ReplySink& sink) { sink.Integer(0); }
  static void SendEmpty(ReplySink& sink) { sink.BeginArray(0); }

  void Del();
  void Exists();
  // Returns the time in milliseconds, as the server counts. A key exists until its last millisecond
  // has passed.
  int64_t now_ms() const;
  // Returns nullopt where the server's numbers overflow.
  std::optional<int64_t> ExpiryAfter(int64_t ttl, int64_t unit_ms);
  void ExpireAfter(int64_t unit_ms);
  void Expire();
  void PExpire();
  void Persist();
  void Pttl();
  void Rename();
  void Type();

  // --- strings

  void Get();
  void MGet();
  void SetString();
  void IncrementString(int64_t by);
  void Incr();
  void Decr();
  void IncrBy();

  // --- hashes

  void HGet();
  void SendField(const Hash& hash, std::string_view field);
  void HMGet();
  static bool Assign(Hash& hash, std::string_view field, std::string_view value);
  void SetFields(const char* name, bool reply_with_count);
  void HSet();
  void HMSet();
  void HSetNx();
  void HDel();
  void HExists();
  void HLen();
  void HGetAll();
  void HKeys();
  void HVals();
  void HIncrBy();

  // --- sets

  void SAdd();
  void SRem();
  void SCard();
  void SIsMember();
  void SMembers();

  // --- sorted sets

  static void Move(SortedSet& set, std::string_view member, double& score, double to);
  static bool Remove(SortedSet& set, std::string_view member);
  struct AddFlags {
    bool only_new = false, only_old = false, only_greater = false, only_less = false,
         count_changed = false;
  };
  // Returns the index of the first score.
  static size_t ParseAddFlags(absl::Span<const std::string_view> args, AddFlags& flags);
  void ZAdd();
  void ZIncrBy();
  void ZRem();
  void ZScore();
  void ZCard();
  static Order::const_iterator LowerEnd(const Order& order, const Bound& min);
  static Order::const_iterator UpperEnd(const Order& order, const Bound& max);
  void ZCount();
  static bool IsEmptyRange(const Bound& min, const Bound& max);
  void ZRank();
  template <typename Iterator>
  void SendRange(Iterator from, Iterator to, bool with_scores);
  void RangeByIndex(bool reverse);
  void ZRange();
  void ZRevRange();
  void RangeByScore(bool reverse);
  void ZRangeByScore();
  void ZRevRangeByScore();
  template <typename Iterator>
  void SendLimited(Iterator from, Iterator to, int64_t offset, int64_t count, bool with_scores);
  void ZRemRangeByScore();

  // --- lists

  void Push(bool left);
  void LPush();
  void RPush();
  void LLen();
  void LRange();
  void LTrim();

  // --- the outside

  void Publish();
  void Time();
  void Info();
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_REDIS_DATABASE_COMMANDS_H_
