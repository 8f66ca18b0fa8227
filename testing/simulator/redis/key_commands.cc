#include "testing/simulator/redis/database_commands.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ddp::testing {

// --- keys

void DatabaseCommands::Del() {
  int64_t count = 0;
  for (size_t i = 1; i < args.size(); ++i) count += EraseKey(args[i]) ? 1 : 0;
  sink.Integer(count);
}

void DatabaseCommands::Exists() {
  int64_t count = 0;
  for (size_t i = 1; i < args.size(); ++i) count += FindKey(args[i]) != nullptr ? 1 : 0;
  sink.Integer(count);
}

int64_t DatabaseCommands::now_ms() const { return world.now_us() / 1000; }

std::optional<int64_t> DatabaseCommands::ExpiryAfter(int64_t ttl, int64_t unit_ms) {
  int64_t at_ms = 0;
  if (__builtin_mul_overflow(ttl, unit_ms, &at_ms) ||
      __builtin_add_overflow(at_ms, now_ms(), &at_ms)) {
    return {};
  }
  return std::min(at_ms, INT64_MAX - 1);
}

void DatabaseCommands::ExpireAfter(int64_t unit_ms) {
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

void DatabaseCommands::Expire() { ExpireAfter(1000); }

void DatabaseCommands::PExpire() { ExpireAfter(1); }

void DatabaseCommands::Persist() {
  Entry* const entry = FindKey(args[1]);
  const bool had = entry != nullptr && entry->expires_at_ms != INT64_MAX;
  if (had) entry->expires_at_ms = INT64_MAX;
  sink.Integer(had ? 1 : 0);
}

void DatabaseCommands::Pttl() {
  const Entry* const entry = FindKey(args[1]);
  if (entry == nullptr) return sink.Integer(-2);
  if (entry->expires_at_ms == INT64_MAX) return sink.Integer(-1);
  sink.Integer(entry->expires_at_ms - now_ms());
}

void DatabaseCommands::Rename() {
  if (FindKey(args[1]) == nullptr) return sink.Error("ERR no such key");
  if (args[1] != args[2]) {
    auto node = db.keys_.extract(db.keys_.find(args[1]));
    EraseKey(args[2]);
    node.key() = std::string(args[2]);
    db.keys_.insert(std::move(node));
  }
  sink.Status("OK");
}

void DatabaseCommands::Type() {
  static constexpr const char* kNames[] = {"string", "hash", "set", "zset", "list"};
  const Entry* const entry = FindKey(args[1]);
  sink.Status(entry == nullptr ? "none" : kNames[entry->value.index()]);
}

// --- strings

void DatabaseCommands::Get() {
  const std::string* const value = FindOrSend<std::string>(SendNil);
  if (value != nullptr) sink.String(*value);
}

void DatabaseCommands::MGet() {
  sink.BeginArray(args.size() - 1);
  for (size_t i = 1; i < args.size(); ++i) {
    const Entry* const entry = FindKey(args[i]);
    const auto* const text = entry ? std::get_if<std::string>(&entry->value) : nullptr;
    text != nullptr ? sink.String(*text) : sink.Nil();
  }
}

void DatabaseCommands::SetString() {
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

void DatabaseCommands::IncrementString(int64_t by) {
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

void DatabaseCommands::Incr() { IncrementString(1); }

void DatabaseCommands::Decr() { IncrementString(-1); }

void DatabaseCommands::IncrBy() {
  const std::optional<int64_t> by = ToInteger(args[2]);
  if (!by) return sink.Error(kNotInteger);
  IncrementString(*by);
}

// --- the outside

void DatabaseCommands::Publish() { sink.Integer(world.publish(args[1], args[2])); }

void DatabaseCommands::Time() {
  const int64_t now_us = world.now_us();
  sink.BeginArray(2);
  sink.String(Number(now_us / 1000000).text());
  sink.String(Number(now_us % 1000000).text());
}

void DatabaseCommands::Info() {
  sink.String(args[1] == "server" ? absl::StrCat("# Server\r\nrun_id:", world.run(), "\r\n") : "");
}

}  // namespace ddp::testing
