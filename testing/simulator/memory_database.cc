#include "testing/simulator/memory_database.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace ddp::testing {
namespace {

constexpr char kWrongType[] = "WRONGTYPE Operation against a key holding the wrong kind of value";
constexpr char kSyntax[] = "ERR syntax error";
constexpr char kNotInteger[] = "ERR value is not an integer or out of range";
constexpr char kNotFloat[] = "ERR value is not a valid float";
constexpr char kNotRange[] = "ERR min or max is not a float";

char Upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }
char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// `upper` is in upper case.
bool Is(std::string_view text, std::string_view upper) {
  return std::equal(text.begin(), text.end(), upper.begin(), upper.end(),
                    [](char a, char b) { return Upper(a) == b; });
}

// As strictly as Redis: no sign but '-', no space, no leading zero.
std::optional<int64_t> ToInteger(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return {};
  const bool has_zero_first = text.size() > 1 && (text[0] == '0' || text.substr(0, 2) == "-0");
  if (has_zero_first) return {};
  return value;
}

std::optional<double> ToDouble(std::string_view text) {
  if (Is(text, "INF") || Is(text, "+INF") || Is(text, "INFINITY") || Is(text, "+INFINITY")) {
    return std::numeric_limits<double>::infinity();
  }
  if (Is(text, "-INF") || Is(text, "-INFINITY")) return -std::numeric_limits<double>::infinity();
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || std::isnan(value)) return {};
  return value;
}

class Number {
 public:
  explicit Number(double value) : size_(snprintf(text_.data(), text_.size(), "%.17g", value)) {}
  explicit Number(int64_t value)
      : size_(std::to_chars(text_.data(), text_.data() + text_.size(), value).ptr - text_.data()) {}
  std::string_view text() const { return {text_.data(), size_}; }

 private:
  std::array<char, 40> text_;
  size_t size_;
};

struct Bound {
  double value = 0;
  bool exclusive = false;
};

std::optional<Bound> ToBound(std::string_view text) {
  Bound bound;
  if (!text.empty() && text[0] == '(') {
    bound.exclusive = true;
    text.remove_prefix(1);
  }
  if (text.empty()) return bound;  // Redis reads nothing as 0 here
  const std::optional<double> value = ToDouble(text);
  if (!value) return {};
  bound.value = *value;
  return bound;
}

// Indexes as in LRANGE and ZRANGE, made into [first, last) of `size` elements.
std::pair<int64_t, int64_t> Slice(int64_t start, int64_t stop, int64_t size) {
  if (start < 0) start = std::max<int64_t>(0, size + start);
  if (stop < 0) stop = size + stop;
  stop = std::min(stop, size - 1);
  if (start > stop || start >= size) return {0, 0};
  return {start, stop + 1};
}

}  // namespace

// The commands, each a member of one call's context.
struct DatabaseCommands {
  using Entry = MemoryDatabase::Entry;
  using Hash = MemoryDatabase::Hash;
  using Set = MemoryDatabase::Set;
  using SortedSet = MemoryDatabase::SortedSet;
  using List = MemoryDatabase::List;
  using Order = std::set<std::pair<double, std::string>>;
  struct Command {
    void (DatabaseCommands::*run)();
    int arguments;  // with the name; negative: at least
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

  // The value of args[1]; null when there is none, or when it is of another type (then the error
  // was sent and `failed` is true).
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

  // Redis keeps no empty containers.
  template <typename T>
  void DropIfEmpty(const T& container) {
    if (container.empty()) db.keys_.erase(db.keys_.find(args[1]));
  }
  void DropIfEmpty(const SortedSet& set) {
    if (set.order.empty()) db.keys_.erase(db.keys_.find(args[1]));
  }

  // Sends `absent` when there is no such key and returns null; null too after an error.
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

  void Del() {
    int64_t count = 0;
    for (size_t i = 1; i < args.size(); ++i) count += EraseKey(args[i]) ? 1 : 0;
    sink.Integer(count);
  }

  void Exists() {
    int64_t count = 0;
    for (size_t i = 1; i < args.size(); ++i) count += FindKey(args[i]) != nullptr ? 1 : 0;
    sink.Integer(count);
  }

  // In milliseconds, as the server counts: a key is there until the last of them has passed.
  int64_t now_ms() const { return world.now_us() / 1000; }

  // None where the server's own numbers overflow.
  std::optional<int64_t> ExpiryAfter(int64_t ttl, int64_t unit_ms) {
    int64_t at_ms = 0;
    if (__builtin_mul_overflow(ttl, unit_ms, &at_ms) ||
        __builtin_add_overflow(at_ms, now_ms(), &at_ms)) {
      return {};
    }
    return std::min(at_ms, INT64_MAX - 1);
  }

  void ExpireAfter(int64_t unit_ms) {
    const std::optional<int64_t> ttl = ToInteger(args[2]);
    if (!ttl) return sink.Error(kNotInteger);
    const std::optional<int64_t> at_ms = ExpiryAfter(*ttl, unit_ms);
    if (!at_ms) {
      return sink.Error(unit_ms == 1 ? "ERR invalid expire time in 'pexpire' command"
                                     : "ERR invalid expire time in 'expire' command");
    }
    Entry* const entry = FindKey(args[1]);
    if (entry == nullptr) return sink.Integer(0);
    if (*ttl <= 0) {
      EraseKey(args[1]);
    } else {
      entry->expires_at_ms = *at_ms;
    }
    sink.Integer(1);
  }
  void Expire() { ExpireAfter(1000); }
  void PExpire() { ExpireAfter(1); }

  void Persist() {
    Entry* const entry = FindKey(args[1]);
    const bool had = entry != nullptr && entry->expires_at_ms != INT64_MAX;
    if (had) entry->expires_at_ms = INT64_MAX;
    sink.Integer(had ? 1 : 0);
  }

  void Pttl() {
    const Entry* const entry = FindKey(args[1]);
    if (entry == nullptr) return sink.Integer(-2);
    if (entry->expires_at_ms == INT64_MAX) return sink.Integer(-1);
    sink.Integer(entry->expires_at_ms - now_ms());
  }

  void Rename() {
    if (FindKey(args[1]) == nullptr) return sink.Error("ERR no such key");
    if (args[1] != args[2]) {
      auto node = db.keys_.extract(db.keys_.find(args[1]));
      EraseKey(args[2]);
      node.key() = std::string(args[2]);
      db.keys_.insert(std::move(node));
    }
    sink.Status("OK");
  }

  void Type() {
    static constexpr const char* kNames[] = {"string", "hash", "set", "zset", "list"};
    const Entry* const entry = FindKey(args[1]);
    sink.Status(entry == nullptr ? "none" : kNames[entry->value.index()]);
  }

  // --- strings

  void Get() {
    const std::string* const value = FindOrSend<std::string>(SendNil);
    if (value != nullptr) sink.String(*value);
  }

  void MGet() {
    sink.BeginArray(args.size() - 1);
    for (size_t i = 1; i < args.size(); ++i) {
      const Entry* const entry = FindKey(args[i]);
      const auto* const text = entry ? std::get_if<std::string>(&entry->value) : nullptr;
      text != nullptr ? sink.String(*text) : sink.Nil();
    }
  }

  void SetString() {
    bool only_new = false, only_old = false, keep_ttl = false;
    int64_t expires_at_ms = INT64_MAX;
    for (size_t i = 3; i < args.size(); ++i) {
      if (Is(args[i], "NX")) {
        only_new = true;
      } else if (Is(args[i], "XX")) {
        only_old = true;
      } else if (Is(args[i], "KEEPTTL")) {
        keep_ttl = true;
      } else if ((Is(args[i], "PX") || Is(args[i], "EX")) && i + 1 < args.size()) {
        const int64_t unit_ms = Is(args[i], "PX") ? 1 : 1000;
        const std::optional<int64_t> ttl = ToInteger(args[++i]);
        if (!ttl) return sink.Error(kNotInteger);
        const std::optional<int64_t> at_ms = ExpiryAfter(*ttl, unit_ms);
        if (*ttl <= 0 || !at_ms) return sink.Error("ERR invalid expire time in 'set' command");
        expires_at_ms = *at_ms;
      } else {
        return sink.Error(kSyntax);
      }
    }
    if (only_new && only_old) return sink.Error(kSyntax);
    Entry* const old = FindKey(args[1]);
    if ((only_new && old != nullptr) || (only_old && old == nullptr)) return sink.Nil();
    Entry& entry = old != nullptr ? *old : db.keys_[std::string(args[1])];
    entry.value = std::string(args[2]);
    if (!keep_ttl) entry.expires_at_ms = expires_at_ms;
    sink.Status("OK");
  }

  void IncrementString(int64_t by) {
    bool failed = false;
    const std::string* const old = Find<std::string>(failed);
    if (failed) return;
    const std::optional<int64_t> value = old != nullptr ? ToInteger(*old) : 0;
    int64_t sum = 0;
    if (!value) return sink.Error(kNotInteger);
    if (__builtin_add_overflow(*value, by, &sum)) {
      return sink.Error("ERR increment or decrement would overflow");
    }
    *FindOrMake<std::string>() = Number(sum).text();
    sink.Integer(sum);
  }
  void Incr() { IncrementString(1); }
  void Decr() { IncrementString(-1); }
  void IncrBy() {
    const std::optional<int64_t> by = ToInteger(args[2]);
    if (!by) return sink.Error(kNotInteger);
    IncrementString(*by);
  }

  // --- hashes

  void HGet() {
    const Hash* const hash = FindOrSend<Hash>(SendNil);
    if (hash != nullptr) SendField(*hash, args[2]);
  }

  void SendField(const Hash& hash, std::string_view field) {
    const auto found = hash.find(field);
    found != hash.end() ? sink.String(found->second) : sink.Nil();
  }

  void HMGet() {
    bool failed = false;
    const Hash* const hash = Find<Hash>(failed);
    if (failed) return;
    sink.BeginArray(args.size() - 2);
    for (size_t i = 2; i < args.size(); ++i) {
      hash != nullptr ? SendField(*hash, args[i]) : sink.Nil();
    }
  }

  static bool Assign(Hash& hash, std::string_view field, std::string_view value) {
    const auto found = hash.find(field);
    if (found != hash.end()) {
      found->second = value;
      return false;
    }
    hash.emplace(field, value);
    return true;
  }

  void SetFields(const char* name, bool reply_with_count) {
    if (args.size() % 2 != 0) {
      const std::string command(name);
      return sink.Error("ERR wrong number of arguments for '" + command + "' command");
    }
    Hash* const hash = FindOrMake<Hash>();
    if (hash == nullptr) return;
    int64_t added = 0;
    for (size_t i = 2; i < args.size(); i += 2) {
      added += Assign(*hash, args[i], args[i + 1]) ? 1 : 0;
    }
    reply_with_count ? sink.Integer(added) : sink.Status("OK");
  }
  void HSet() { SetFields("hset", true); }
  void HMSet() { SetFields("hmset", false); }

  void HSetNx() {
    Hash* const hash = FindOrMake<Hash>();
    if (hash == nullptr) return;
    const bool is_new = hash->find(args[2]) == hash->end();
    if (is_new) hash->emplace(args[2], args[3]);
    sink.Integer(is_new ? 1 : 0);
  }

  void HDel() {
    Hash* const hash = FindOrSend<Hash>(SendZero);
    if (hash == nullptr) return;
    int64_t count = 0;
    for (size_t i = 2; i < args.size(); ++i) {
      const auto found = hash->find(args[i]);
      if (found == hash->end()) continue;
      hash->erase(found);
      ++count;
    }
    DropIfEmpty(*hash);
    sink.Integer(count);
  }

  void HExists() {
    const Hash* const hash = FindOrSend<Hash>(SendZero);
    if (hash != nullptr) sink.Integer(hash->find(args[2]) != hash->end() ? 1 : 0);
  }

  void HLen() {
    const Hash* const hash = FindOrSend<Hash>(SendZero);
    if (hash != nullptr) sink.Integer(static_cast<int64_t>(hash->size()));
  }

  void HGetAll() {
    const Hash* const hash = FindOrSend<Hash>(SendEmpty);
    if (hash == nullptr) return;
    sink.BeginArray(2 * hash->size());
    for (const auto& [field, value] : *hash) {
      sink.String(field);
      sink.String(value);
    }
  }

  void HKeys() {
    const Hash* const hash = FindOrSend<Hash>(SendEmpty);
    if (hash == nullptr) return;
    sink.BeginArray(hash->size());
    for (const auto& [field, value] : *hash) sink.String(field);
  }

  void HVals() {
    const Hash* const hash = FindOrSend<Hash>(SendEmpty);
    if (hash == nullptr) return;
    sink.BeginArray(hash->size());
    for (const auto& [field, value] : *hash) sink.String(value);
  }

  void HIncrBy() {
    const std::optional<int64_t> by = ToInteger(args[3]);
    if (!by) return sink.Error(kNotInteger);
    Hash* const hash = FindOrMake<Hash>();
    if (hash == nullptr) return;
    const auto found = hash->find(args[2]);
    const std::optional<int64_t> value = found != hash->end() ? ToInteger(found->second) : 0;
    if (!value) return sink.Error("ERR hash value is not an integer");
    int64_t sum = 0;
    if (__builtin_add_overflow(*value, *by, &sum)) {
      return sink.Error("ERR increment or decrement would overflow");
    }
    Assign(*hash, args[2], Number(sum).text());
    sink.Integer(sum);
  }

  // --- sets

  void SAdd() {
    Set* const set = FindOrMake<Set>();
    if (set == nullptr) return;
    int64_t count = 0;
    for (size_t i = 2; i < args.size(); ++i) count += set->emplace(args[i]).second ? 1 : 0;
    sink.Integer(count);
  }

  void SRem() {
    Set* const set = FindOrSend<Set>(SendZero);
    if (set == nullptr) return;
    int64_t count = 0;
    for (size_t i = 2; i < args.size(); ++i) {
      const auto found = set->find(args[i]);
      if (found == set->end()) continue;
      set->erase(found);
      ++count;
    }
    DropIfEmpty(*set);
    sink.Integer(count);
  }

  void SCard() {
    const Set* const set = FindOrSend<Set>(SendZero);
    if (set != nullptr) sink.Integer(static_cast<int64_t>(set->size()));
  }

  void SIsMember() {
    const Set* const set = FindOrSend<Set>(SendZero);
    if (set != nullptr) sink.Integer(set->find(args[2]) != set->end() ? 1 : 0);
  }

  void SMembers() {
    const Set* const set = FindOrSend<Set>(SendEmpty);
    if (set == nullptr) return;
    sink.BeginArray(set->size());
    for (const std::string& member : *set) sink.String(member);
  }

  // --- sorted sets

  static void Move(SortedSet& set, std::string_view member, double& score, double to) {
    auto node = set.order.extract({score, std::string(member)});
    node.value().first = to;
    set.order.insert(std::move(node));
    score = to;
  }

  static bool Remove(SortedSet& set, std::string_view member) {
    const auto found = set.scores.find(member);
    if (found == set.scores.end()) return false;
    set.order.erase({found->second, found->first});
    set.scores.erase(found);
    return true;
  }

  struct AddFlags {
    bool only_new = false, only_old = false, only_greater = false, only_less = false,
         count_changed = false;
  };

  // The index of the first score.
  static size_t ParseAddFlags(absl::Span<const std::string_view> args, AddFlags& flags) {
    size_t at = 2;
    for (; at < args.size(); ++at) {
      if (Is(args[at], "NX")) {
        flags.only_new = true;
      } else if (Is(args[at], "XX")) {
        flags.only_old = true;
      } else if (Is(args[at], "GT")) {
        flags.only_greater = true;
      } else if (Is(args[at], "LT")) {
        flags.only_less = true;
      } else if (Is(args[at], "CH")) {
        flags.count_changed = true;
      } else {
        break;
      }
    }
    return at;
  }

  void ZAdd() {
    AddFlags flags;
    const size_t first = ParseAddFlags(args, flags);
    if (first >= args.size() || (args.size() - first) % 2 != 0) return sink.Error(kSyntax);
    std::vector<double> scores;
    for (size_t i = first; i < args.size(); i += 2) {
      const std::optional<double> score = ToDouble(args[i]);
      if (!score) return sink.Error(kNotFloat);
      scores.push_back(*score);
    }
    if (flags.only_old && FindKey(args[1]) == nullptr) return sink.Integer(0);
    SortedSet* const set = FindOrMake<SortedSet>();
    if (set == nullptr) return;
    int64_t added = 0, changed = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      const std::string_view member = args[first + 2 * i + 1];
      const auto found = set->scores.find(member);
      if (found == set->scores.end()) {
        if (flags.only_old) continue;
        set->scores.emplace(member, scores[i]);
        set->order.emplace(scores[i], member);
        ++added;
        continue;
      }
      double& score = found->second;
      const bool refused = flags.only_new || (flags.only_greater && scores[i] <= score) ||
                           (flags.only_less && scores[i] >= score);
      if (refused || scores[i] == score) continue;
      Move(*set, member, score, scores[i]);
      ++changed;
    }
    DropIfEmpty(*set);
    sink.Integer(flags.count_changed ? added + changed : added);
  }

  void ZIncrBy() {
    const std::optional<double> by = ToDouble(args[2]);
    if (!by) return sink.Error(kNotFloat);
    SortedSet* const set = FindOrMake<SortedSet>();
    if (set == nullptr) return;
    const auto [found, is_new] = set->scores.emplace(args[3], *by);
    if (is_new) {
      set->order.emplace(*by, args[3]);
    } else {
      Move(*set, args[3], found->second, found->second + *by);
    }
    sink.String(Number(found->second).text());
  }

  void ZRem() {
    SortedSet* const set = FindOrSend<SortedSet>(SendZero);
    if (set == nullptr) return;
    int64_t count = 0;
    for (size_t i = 2; i < args.size(); ++i) count += Remove(*set, args[i]) ? 1 : 0;
    DropIfEmpty(*set);
    sink.Integer(count);
  }

  void ZScore() {
    const SortedSet* const set = FindOrSend<SortedSet>(SendNil);
    if (set == nullptr) return;
    const auto found = set->scores.find(args[2]);
    found != set->scores.end() ? sink.String(Number(found->second).text()) : sink.Nil();
  }

  void ZCard() {
    const SortedSet* const set = FindOrSend<SortedSet>(SendZero);
    if (set != nullptr) sink.Integer(static_cast<int64_t>(set->order.size()));
  }

  static Order::const_iterator LowerEnd(const Order& order, const Bound& min) {
    if (!min.exclusive) return order.lower_bound({min.value, std::string()});
    const double next = std::nextafter(min.value, std::numeric_limits<double>::infinity());
    if (next == min.value) return order.end();
    return order.lower_bound({next, std::string()});
  }
  static Order::const_iterator UpperEnd(const Order& order, const Bound& max) {
    return LowerEnd(order, {max.value, !max.exclusive});
  }

  void ZCount() {
    const std::optional<Bound> min = ToBound(args[2]), max = ToBound(args[3]);
    if (!min || !max) return sink.Error(kNotRange);
    const SortedSet* const set = FindOrSend<SortedSet>(SendZero);
    if (set == nullptr) return;
    if (IsEmptyRange(*min, *max)) return sink.Integer(0);
    const auto from = LowerEnd(set->order, *min), to = UpperEnd(set->order, *max);
    // The smaller of inside and outside is walked: most ranges are nearly all or nearly none.
    auto in = from, out = set->order.begin();
    if (out == from) out = to;
    int64_t steps = 0;
    while (in != to && out != set->order.end()) {
      ++in;
      ++steps;
      if (++out == from) out = to;
    }
    sink.Integer(in == to ? steps : static_cast<int64_t>(set->order.size()) - steps);
  }

  static bool IsEmptyRange(const Bound& min, const Bound& max) {
    return min.value > max.value || (min.value == max.value && (min.exclusive || max.exclusive));
  }

  void ZRank() {
    const SortedSet* const set = FindOrSend<SortedSet>(SendNil);
    if (set == nullptr) return;
    const auto found = set->scores.find(args[2]);
    if (found == set->scores.end()) return sink.Nil();
    const auto at = set->order.find({found->second, found->first});
    sink.Integer(std::distance(set->order.begin(), at));
  }

  template <typename Iterator>
  void SendRange(Iterator from, Iterator to, bool with_scores) {
    const int64_t size = std::distance(from, to);
    sink.BeginArray(with_scores ? 2 * size : size);
    for (; from != to; ++from) {
      sink.String(from->second);
      if (with_scores) sink.String(Number(from->first).text());
    }
  }

  void RangeByIndex(bool reverse) {
    const std::optional<int64_t> start = ToInteger(args[2]), stop = ToInteger(args[3]);
    if (!start || !stop) return sink.Error(kNotInteger);
    bool with_scores = false;
    for (size_t i = 4; i < args.size(); ++i) {
      if (!Is(args[i], "WITHSCORES")) return sink.Error(kSyntax);
      with_scores = true;
    }
    const SortedSet* const set = FindOrSend<SortedSet>(SendEmpty);
    if (set == nullptr) return;
    const auto [first, last] = Slice(*start, *stop, static_cast<int64_t>(set->order.size()));
    if (reverse) {
      const auto from = std::next(set->order.rbegin(), first);
      SendRange(from, std::next(from, last - first), with_scores);
    } else {
      const auto from = std::next(set->order.begin(), first);
      SendRange(from, std::next(from, last - first), with_scores);
    }
  }
  void ZRange() { RangeByIndex(false); }
  void ZRevRange() { RangeByIndex(true); }

  void RangeByScore(bool reverse) {
    std::optional<Bound> min = ToBound(args[2]), max = ToBound(args[3]);
    if (reverse) std::swap(min, max);
    bool with_scores = false;
    int64_t offset = 0, count = -1;
    for (size_t i = 4; i < args.size(); ++i) {
      if (Is(args[i], "WITHSCORES")) {
        with_scores = true;
      } else if (Is(args[i], "LIMIT") && i + 2 < args.size()) {
        const std::optional<int64_t> skip = ToInteger(args[i + 1]), take = ToInteger(args[i + 2]);
        if (!skip || !take) return sink.Error(kNotInteger);
        std::tie(offset, count) = std::tuple(*skip, *take);
        i += 2;
      } else {
        return sink.Error(kSyntax);
      }
    }
    if (!min || !max) return sink.Error(kNotRange);
    const SortedSet* const set = FindOrSend<SortedSet>(SendEmpty);
    if (set == nullptr) return;
    if (IsEmptyRange(*min, *max)) return sink.BeginArray(0);
    const auto from = LowerEnd(set->order, *min), to = UpperEnd(set->order, *max);
    if (reverse) {
      SendLimited(std::make_reverse_iterator(to), std::make_reverse_iterator(from), offset, count,
                  with_scores);
    } else {
      SendLimited(from, to, offset, count, with_scores);
    }
  }
  void ZRangeByScore() { RangeByScore(false); }
  void ZRevRangeByScore() { RangeByScore(true); }

  template <typename Iterator>
  void SendLimited(Iterator from, Iterator to, int64_t offset, int64_t count, bool with_scores) {
    if (offset < 0) return sink.BeginArray(0);
    for (; offset > 0 && from != to; --offset) ++from;
    if (count >= 0) {
      Iterator end = from;
      for (; count > 0 && end != to; --count) ++end;
      to = end;
    }
    SendRange(from, to, with_scores);
  }

  void ZRemRangeByScore() {
    const std::optional<Bound> min = ToBound(args[2]), max = ToBound(args[3]);
    if (!min || !max) return sink.Error(kNotRange);
    SortedSet* const set = FindOrSend<SortedSet>(SendZero);
    if (set == nullptr) return;
    int64_t count = 0;
    if (!IsEmptyRange(*min, *max)) {
      const auto to = UpperEnd(set->order, *max);
      for (auto at = LowerEnd(set->order, *min); at != to; ++count) {
        set->scores.erase(at->second);
        at = set->order.erase(at);
      }
    }
    DropIfEmpty(*set);
    sink.Integer(count);
  }

  // --- lists

  void Push(bool left) {
    List* const list = FindOrMake<List>();
    if (list == nullptr) return;
    for (size_t i = 2; i < args.size(); ++i) {
      left ? list->emplace_front(args[i]) : list->emplace_back(args[i]);
    }
    sink.Integer(static_cast<int64_t>(list->size()));
  }
  void LPush() { Push(true); }
  void RPush() { Push(false); }

  void LLen() {
    const List* const list = FindOrSend<List>(SendZero);
    if (list != nullptr) sink.Integer(static_cast<int64_t>(list->size()));
  }

  void LRange() {
    const std::optional<int64_t> start = ToInteger(args[2]), stop = ToInteger(args[3]);
    if (!start || !stop) return sink.Error(kNotInteger);
    const List* const list = FindOrSend<List>(SendEmpty);
    if (list == nullptr) return;
    const auto [first, last] = Slice(*start, *stop, static_cast<int64_t>(list->size()));
    sink.BeginArray(last - first);
    for (int64_t i = first; i < last; ++i) sink.String((*list)[i]);
  }

  void LTrim() {
    const std::optional<int64_t> start = ToInteger(args[2]), stop = ToInteger(args[3]);
    if (!start || !stop) return sink.Error(kNotInteger);
    bool failed = false;
    List* const list = Find<List>(failed);
    if (failed) return;
    if (list != nullptr) {
      const auto [first, last] = Slice(*start, *stop, static_cast<int64_t>(list->size()));
      list->erase(list->begin() + last, list->end());
      list->erase(list->begin(), list->begin() + first);
      DropIfEmpty(*list);
    }
    sink.Status("OK");
  }

  // --- the outside

  void Publish() { sink.Integer(world.publish(args[1], args[2])); }

  void Time() {
    const int64_t now_us = world.now_us();
    sink.BeginArray(2);
    sink.String(Number(now_us / 1000000).text());
    sink.String(Number(now_us % 1000000).text());
  }
};

const std::unordered_map<std::string_view, DatabaseCommands::Command>& DatabaseCommands::Table() {
  using C = DatabaseCommands;
  static const auto* const kTable = new std::unordered_map<std::string_view, Command>{
      {"DEL", {&C::Del, -2}},
      {"UNLINK", {&C::Del, -2}},
      {"EXISTS", {&C::Exists, -2}},
      {"EXPIRE", {&C::Expire, 3}},
      {"PEXPIRE", {&C::PExpire, 3}},
      {"PERSIST", {&C::Persist, 2}},
      {"PTTL", {&C::Pttl, 2}},
      {"RENAME", {&C::Rename, 3}},
      {"TYPE", {&C::Type, 2}},
      {"GET", {&C::Get, 2}},
      {"MGET", {&C::MGet, -2}},
      {"SET", {&C::SetString, -3}},
      {"INCR", {&C::Incr, 2}},
      {"DECR", {&C::Decr, 2}},
      {"INCRBY", {&C::IncrBy, 3}},
      {"HGET", {&C::HGet, 3}},
      {"HMGET", {&C::HMGet, -3}},
      {"HSET", {&C::HSet, -4}},
      {"HMSET", {&C::HMSet, -4}},
      {"HSETNX", {&C::HSetNx, 4}},
      {"HDEL", {&C::HDel, -3}},
      {"HEXISTS", {&C::HExists, 3}},
      {"HLEN", {&C::HLen, 2}},
      {"HGETALL", {&C::HGetAll, 2}},
      {"HKEYS", {&C::HKeys, 2}},
      {"HVALS", {&C::HVals, 2}},
      {"HINCRBY", {&C::HIncrBy, 4}},
      {"SADD", {&C::SAdd, -3}},
      {"SREM", {&C::SRem, -3}},
      {"SCARD", {&C::SCard, 2}},
      {"SISMEMBER", {&C::SIsMember, 3}},
      {"SMEMBERS", {&C::SMembers, 2}},
      {"ZADD", {&C::ZAdd, -4}},
      {"ZINCRBY", {&C::ZIncrBy, 4}},
      {"ZREM", {&C::ZRem, -3}},
      {"ZSCORE", {&C::ZScore, 3}},
      {"ZCARD", {&C::ZCard, 2}},
      {"ZCOUNT", {&C::ZCount, 4}},
      {"ZRANK", {&C::ZRank, 3}},
      {"ZRANGE", {&C::ZRange, -4}},
      {"ZREVRANGE", {&C::ZRevRange, -4}},
      {"ZRANGEBYSCORE", {&C::ZRangeByScore, -4}},
      {"ZREVRANGEBYSCORE", {&C::ZRevRangeByScore, -4}},
      {"ZREMRANGEBYSCORE", {&C::ZRemRangeByScore, 4}},
      {"LPUSH", {&C::LPush, -3}},
      {"RPUSH", {&C::RPush, -3}},
      {"LLEN", {&C::LLen, 2}},
      {"LRANGE", {&C::LRange, 4}},
      {"LTRIM", {&C::LTrim, 4}},
      {"PUBLISH", {&C::Publish, 3}},
      {"TIME", {&C::Time, 1}},
  };
  return *kTable;
}

void MemoryDatabase::Run(absl::Span<const std::string_view> args, const World& world,
                         ReplySink& sink) {
  const std::unordered_map<std::string_view, DatabaseCommands::Command>& table =
      DatabaseCommands::Table();
  std::array<char, 24> name{};
  const size_t size = std::min(args[0].size(), name.size());
  std::transform(args[0].begin(), args[0].begin() + size, name.begin(), Upper);
  const auto found = table.find(std::string_view(name.data(), size));
  if (found == table.end()) {
    return sink.Refused(true, "ERR unknown command '" + std::string(args[0]) + "'");
  }
  const int wanted = found->second.arguments;
  const int given = static_cast<int>(args.size());
  if (wanted >= 0 ? given != wanted : given < -wanted) {
    std::transform(args[0].begin(), args[0].end(), name.begin(), Lower);
    return sink.Refused(false, "ERR wrong number of arguments for '" +
                                   std::string(name.data(), size) + "' command");
  }
  DatabaseCommands commands{*this, args, world, sink};
  (commands.*found->second.run)();
}

}  // namespace ddp::testing
