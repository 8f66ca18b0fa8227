#include "testing/simulator/redis/database_commands.h"

#include <cmath>
#include <iterator>
#include <limits>
#include <tuple>
#include <vector>

namespace ddp::testing {

// --- sorted sets

void DatabaseCommands::Move(SortedSet& set, std::string_view member, double& score, double to) {
  auto node = set.order.extract({score, std::string(member)});
  node.value().first = to;
  set.order.insert(std::move(node));
  score = to;
}

bool DatabaseCommands::Remove(SortedSet& set, std::string_view member) {
  const auto found = set.scores.find(member);
  if (found == set.scores.end()) return false;
  set.order.erase({found->second, found->first});
  set.scores.erase(found);
  return true;
}

size_t DatabaseCommands::ParseAddFlags(absl::Span<const std::string_view> args, AddFlags& flags) {
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

void DatabaseCommands::ZAdd() {
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

void DatabaseCommands::ZIncrBy() {
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

void DatabaseCommands::ZRem() {
  SortedSet* const set = FindOrSend<SortedSet>(SendZero);
  if (set == nullptr) return;
  int64_t count = 0;
  for (size_t i = 2; i < args.size(); ++i) count += Remove(*set, args[i]) ? 1 : 0;
  DropIfEmpty(*set);
  sink.Integer(count);
}

void DatabaseCommands::ZScore() {
  const SortedSet* const set = FindOrSend<SortedSet>(SendNil);
  if (set == nullptr) return;
  const auto found = set->scores.find(args[2]);
  found != set->scores.end() ? sink.String(Number(found->second).text()) : sink.Nil();
}

void DatabaseCommands::ZCard() {
  const SortedSet* const set = FindOrSend<SortedSet>(SendZero);
  if (set != nullptr) sink.Integer(static_cast<int64_t>(set->order.size()));
}

DatabaseCommands::Order::const_iterator DatabaseCommands::LowerEnd(const Order& order,
                                                                   const Bound& min) {
  if (!min.exclusive) return order.lower_bound({min.value, std::string()});
  const double next = std::nextafter(min.value, std::numeric_limits<double>::infinity());
  if (next == min.value) return order.end();
  return order.lower_bound({next, std::string()});
}

DatabaseCommands::Order::const_iterator DatabaseCommands::UpperEnd(const Order& order,
                                                                   const Bound& max) {
  return LowerEnd(order, {max.value, !max.exclusive});
}

void DatabaseCommands::ZCount() {
  const std::optional<Bound> min = ToBound(args[2]), max = ToBound(args[3]);
  if (!min || !max) return sink.Error(kNotRange);
  const SortedSet* const set = FindOrSend<SortedSet>(SendZero);
  if (set == nullptr) return;
  if (IsEmptyRange(*min, *max)) return sink.Integer(0);
  const auto from = LowerEnd(set->order, *min), to = UpperEnd(set->order, *max);
  // Counts the smaller of inside and outside: most ranges contain nearly all or nearly none.
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

bool DatabaseCommands::IsEmptyRange(const Bound& min, const Bound& max) {
  return min.value > max.value || (min.value == max.value && (min.exclusive || max.exclusive));
}

void DatabaseCommands::ZRank() {
  const SortedSet* const set = FindOrSend<SortedSet>(SendNil);
  if (set == nullptr) return;
  const auto found = set->scores.find(args[2]);
  if (found == set->scores.end()) return sink.Nil();
  const auto at = set->order.find({found->second, found->first});
  sink.Integer(std::distance(set->order.begin(), at));
}

template <typename Iterator>
void DatabaseCommands::SendRange(Iterator from, Iterator to, bool with_scores) {
  const int64_t size = std::distance(from, to);
  sink.BeginArray(with_scores ? 2 * size : size);
  for (; from != to; ++from) {
    sink.String(from->second);
    if (with_scores) sink.String(Number(from->first).text());
  }
}

void DatabaseCommands::RangeByIndex(bool reverse) {
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

void DatabaseCommands::ZRange() { RangeByIndex(false); }

void DatabaseCommands::ZRevRange() { RangeByIndex(true); }

void DatabaseCommands::RangeByScore(bool reverse) {
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

void DatabaseCommands::ZRangeByScore() { RangeByScore(false); }

void DatabaseCommands::ZRevRangeByScore() { RangeByScore(true); }

template <typename Iterator>
void DatabaseCommands::SendLimited(Iterator from, Iterator to, int64_t offset, int64_t count,
                                   bool with_scores) {
  if (offset < 0) return sink.BeginArray(0);
  for (; offset > 0 && from != to; --offset) ++from;
  if (count >= 0) {
    Iterator end = from;
    for (; count > 0 && end != to; --count) ++end;
    to = end;
  }
  SendRange(from, to, with_scores);
}

void DatabaseCommands::ZRemRangeByScore() {
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

}  // namespace ddp::testing
