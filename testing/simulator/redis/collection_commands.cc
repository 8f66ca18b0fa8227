#include "testing/simulator/redis/database_commands.h"

namespace ddp::testing {

// --- hashes

void DatabaseCommands::HGet() {
  const Hash* const hash = FindOrSend<Hash>(SendNil);
  if (hash != nullptr) SendField(*hash, args[2]);
}

void DatabaseCommands::SendField(const Hash& hash, std::string_view field) {
  const auto found = hash.find(field);
  found != hash.end() ? sink.String(found->second) : sink.Nil();
}

void DatabaseCommands::HMGet() {
  bool failed = false;
  const Hash* const hash = Find<Hash>(failed);
  if (failed) return;
  sink.BeginArray(args.size() - 2);
  for (size_t i = 2; i < args.size(); ++i) {
    hash != nullptr ? SendField(*hash, args[i]) : sink.Nil();
  }
}

bool DatabaseCommands::Assign(Hash& hash, std::string_view field, std::string_view value) {
  const auto found = hash.find(field);
  if (found != hash.end()) {
    found->second = value;
    return false;
  }
  hash.emplace(field, value);
  return true;
}

void DatabaseCommands::SetFields(const char* name, bool reply_with_count) {
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

void DatabaseCommands::HSet() { SetFields("hset", true); }

void DatabaseCommands::HMSet() { SetFields("hmset", false); }

void DatabaseCommands::HSetNx() {
  Hash* const hash = FindOrMake<Hash>();
  if (hash == nullptr) return;
  const bool is_new = hash->find(args[2]) == hash->end();
  if (is_new) hash->emplace(args[2], args[3]);
  sink.Integer(is_new ? 1 : 0);
}

void DatabaseCommands::HDel() {
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

void DatabaseCommands::HExists() {
  const Hash* const hash = FindOrSend<Hash>(SendZero);
  if (hash != nullptr) sink.Integer(hash->find(args[2]) != hash->end() ? 1 : 0);
}

void DatabaseCommands::HLen() {
  const Hash* const hash = FindOrSend<Hash>(SendZero);
  if (hash != nullptr) sink.Integer(static_cast<int64_t>(hash->size()));
}

void DatabaseCommands::HGetAll() {
  const Hash* const hash = FindOrSend<Hash>(SendEmpty);
  if (hash == nullptr) return;
  sink.BeginArray(2 * hash->size());
  for (const auto& [field, value] : *hash) {
    sink.String(field);
    sink.String(value);
  }
}

void DatabaseCommands::HKeys() {
  const Hash* const hash = FindOrSend<Hash>(SendEmpty);
  if (hash == nullptr) return;
  sink.BeginArray(hash->size());
  for (const auto& [field, value] : *hash) sink.String(field);
}

void DatabaseCommands::HVals() {
  const Hash* const hash = FindOrSend<Hash>(SendEmpty);
  if (hash == nullptr) return;
  sink.BeginArray(hash->size());
  for (const auto& [field, value] : *hash) sink.String(value);
}

void DatabaseCommands::HIncrBy() {
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

void DatabaseCommands::SAdd() {
  Set* const set = FindOrMake<Set>();
  if (set == nullptr) return;
  int64_t count = 0;
  for (size_t i = 2; i < args.size(); ++i) count += set->emplace(args[i]).second ? 1 : 0;
  sink.Integer(count);
}

void DatabaseCommands::SRem() {
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

void DatabaseCommands::SCard() {
  const Set* const set = FindOrSend<Set>(SendZero);
  if (set != nullptr) sink.Integer(static_cast<int64_t>(set->size()));
}

void DatabaseCommands::SIsMember() {
  const Set* const set = FindOrSend<Set>(SendZero);
  if (set != nullptr) sink.Integer(set->find(args[2]) != set->end() ? 1 : 0);
}

void DatabaseCommands::SMembers() {
  const Set* const set = FindOrSend<Set>(SendEmpty);
  if (set == nullptr) return;
  sink.BeginArray(set->size());
  for (const std::string& member : *set) sink.String(member);
}

// --- lists

void DatabaseCommands::Push(bool left) {
  List* const list = FindOrMake<List>();
  if (list == nullptr) return;
  for (size_t i = 2; i < args.size(); ++i) {
    left ? list->emplace_front(args[i]) : list->emplace_back(args[i]);
  }
  sink.Integer(static_cast<int64_t>(list->size()));
}

void DatabaseCommands::LPush() { Push(true); }

void DatabaseCommands::RPush() { Push(false); }

void DatabaseCommands::LLen() {
  const List* const list = FindOrSend<List>(SendZero);
  if (list != nullptr) sink.Integer(static_cast<int64_t>(list->size()));
}

void DatabaseCommands::LRange() {
  const std::optional<int64_t> start = ToInteger(args[2]), stop = ToInteger(args[3]);
  if (!start || !stop) return sink.Error(kNotInteger);
  const List* const list = FindOrSend<List>(SendEmpty);
  if (list == nullptr) return;
  const auto [first, last] = Slice(*start, *stop, static_cast<int64_t>(list->size()));
  sink.BeginArray(last - first);
  for (int64_t i = first; i < last; ++i) sink.String((*list)[i]);
}

void DatabaseCommands::LTrim() {
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

}  // namespace ddp::testing
