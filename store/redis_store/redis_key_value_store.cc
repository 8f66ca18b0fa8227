#include "store/redis_store/redis_key_value_store.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "store/redis/redis_errors.h"
#include "store/redis_store/key_value_scripts.h"

namespace ddp::store {
namespace {

namespace scripts = ::ddp::embedded::key_value_scripts;

constexpr absl::Duration kShortestAnswerTime = absl::Seconds(1);
constexpr size_t kMaxNamedKeys = 8;
// Keys of one HMGET. Redis must send far less than 32 MB at once (see Sizes in the header).
constexpr size_t kKeysPerPiece = 1024;
constexpr char kKeysPerPage[] = "1000";

// Returns the script of `source`. Scripts are immutable and never destroyed, because a store may
// live as long as the process.
template <const char* source>
const RedisScript& Script() {
  static const RedisScript* const kScript = new RedisScript(source);
  return *kScript;
}

bool HasCome(const RedisReply& reply) { return !reply.IsNil(); }

// Returns the keys of `asked` that missing_keys.lua has reported as missing.
absl::StatusOr<std::vector<std::string>> Pick(const std::vector<std::string>& asked,
                                              const RedisReply& reply) {
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> places, reply.AsArray());
  std::vector<std::string> missing;
  for (const RedisReply& place : places) {
    DDP_ASSIGN_OR_RETURN(const int64_t index, place.AsInteger());
    if (index < 1 || index > static_cast<int64_t>(asked.size())) {
      return absl::InternalError(
          absl::StrCat("Redis names missing key ", index, " of ", asked.size()));
    }
    missing.push_back(asked[index - 1]);
  }
  return missing;
}

// Moves the values in `reply` to their places in `values`, and removes these places from `missing`.
// The reply answers a question for the places in `missing`.
absl::Status TakeValues(RedisReply reply, std::vector<size_t>& missing,
                        std::vector<std::string>& values) {
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> elements, std::move(reply).AsArray());
  if (elements.size() != missing.size()) {
    return absl::InternalError(
        absl::StrCat("Redis answered ", elements.size(), " values for ", missing.size(), " keys"));
  }
  std::vector<size_t> still;
  for (size_t i = 0; i < elements.size(); ++i) {
    if (elements[i].IsNil()) {
      still.push_back(missing[i]);
    } else {
      DDP_ASSIGN_OR_RETURN(values[missing[i]], std::move(elements[i]).AsString());
    }
  }
  missing = std::move(still);
  return absl::OkStatus();
}

std::vector<std::string> NamesOf(const std::vector<std::string>& keys,
                                 const std::vector<size_t>& places) {
  std::vector<std::string> names;
  names.reserve(places.size());
  for (const size_t place : places) names.push_back(keys[place]);
  return names;
}

}  // namespace

RedisKeyValueStore::RedisKeyValueStore(const StoreAddress& address, const Options& options,
                                       std::unique_ptr<SharedRedisConnection> connection)
    : address_(address),
      options_(options),
      values_key_(absl::StrCat(address.prefix, "values")),
      channels_(absl::StrCat(address.prefix, "changed:")),
      renewal_interval_(options.key_ttl / 100),
      connection_(std::move(connection)),
      renewed_(clock_.Now()),
      random_(std::random_device()()) {}

RedisKeyValueStore::~RedisKeyValueStore() = default;

absl::StatusOr<std::unique_ptr<RedisKeyValueStore>> RedisKeyValueStore::Connect(
    const StoreAddress& address, const Options& options) {
  if (address.prefix.empty()) {
    return absl::InvalidArgumentError("the store's prefix is empty");
  }
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<SharedRedisConnection> connection,
                       SharedRedisConnection::Connect(address.endpoint, options.connection));
  return std::unique_ptr<RedisKeyValueStore>(
      new RedisKeyValueStore(address, options, std::move(connection)));
}

// Values. ----------------------------------------------------------------------------------------

absl::Status RedisKeyValueStore::Set(const std::string& key, const std::string& value,
                                     absl::Duration timeout) {
  return Change(key, {"HSET", values_key_, key, value}, true, DeadlineOf(timeout)).status();
}

absl::Status RedisKeyValueStore::MultiSet(const std::vector<std::string>& keys,
                                          const std::vector<std::string>& values,
                                          absl::Duration timeout) {
  if (keys.size() != values.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("MultiSet: ", keys.size(), " keys, but ", values.size(), " values"));
  }
  if (keys.empty()) return absl::OkStatus();
  std::vector<std::string> args;
  args.reserve(2 * keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    args.push_back(keys[i]);
    args.push_back(values[i]);
  }
  return ChangeByScript(Script<scripts::kSetValues>(), args, true, DeadlineOf(timeout)).status();
}

absl::StatusOr<std::string> RedisKeyValueStore::Get(const std::string& key,
                                                    absl::Duration timeout) {
  const absl::Time deadline = DeadlineOf(timeout);
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  DDP_ASSIGN_OR_RETURN(RedisReply reply, AwaitOne(key, {"HGET", values_key_, key}, true, deadline));
  return std::move(reply).AsString();
}

absl::StatusOr<std::vector<std::string>> RedisKeyValueStore::MultiGet(
    const std::vector<std::string>& keys, absl::Duration timeout) {
  std::vector<std::string> values(keys.size());
  const absl::Time start = clock_.Now();
  const absl::Time deadline = start + timeout;
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  for (size_t first = 0; first < keys.size(); first += kKeysPerPiece) {
    std::vector<size_t> places(std::min(kKeysPerPiece, keys.size() - first));
    std::iota(places.begin(), places.end(), first);
    DDP_RETURN_IF_ERROR(AwaitValues(keys, std::move(places), start, deadline, values));
  }
  return values;
}

absl::StatusOr<std::string> RedisKeyValueStore::CompareSet(const std::string& key,
                                                           const std::string& expected,
                                                           const std::string& desired,
                                                           absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(RedisReply reply,
                       ChangeByScript(Script<scripts::kCompareSetValue>(), {key, expected, desired},
                                      false, DeadlineOf(timeout)));
  return std::move(reply).AsString();
}

absl::StatusOr<int64_t> RedisKeyValueStore::Add(const std::string& key, int64_t value,
                                                absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(
      const RedisReply reply,
      Change(key, {"HINCRBY", values_key_, key, absl::StrCat(value)}, false, DeadlineOf(timeout)));
  return reply.AsInteger();
}

absl::Status RedisKeyValueStore::Append(const std::string& key, const std::string& value,
                                        absl::Duration timeout) {
  return ChangeByScript(Script<scripts::kAppendValue>(), {key, value}, false, DeadlineOf(timeout))
      .status();
}

absl::StatusOr<bool> RedisKeyValueStore::Delete(const std::string& key, absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                       Run({"HDEL", values_key_, key}, false, DeadlineOf(timeout)));
  DDP_ASSIGN_OR_RETURN(const int64_t removed, reply.AsInteger());
  return removed > 0;
}

absl::StatusOr<bool> RedisKeyValueStore::Check(const std::vector<std::string>& keys,
                                               absl::Duration timeout) {
  if (keys.empty()) return true;
  const absl::Time deadline = DeadlineOf(timeout);
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                       connection_->Eval(Script<scripts::kMissingKeys>(), KeysOfWait(keys), keys,
                                         CallOptions(true, deadline)));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> missing, Pick(keys, reply));
  return missing.empty();
}

absl::Status RedisKeyValueStore::Wait(const std::vector<std::string>& keys,
                                      absl::Duration timeout) {
  if (keys.empty()) return absl::OkStatus();
  const absl::Time start = clock_.Now();
  const absl::Time deadline = start + timeout;
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  while (true) {
    DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                         connection_->Eval(Script<scripts::kMissingKeys>(), KeysOfWait(keys), keys,
                                           CallOptions(true, deadline)));
    DDP_ASSIGN_OR_RETURN(std::vector<std::string> missing, Pick(keys, reply));
    if (missing.empty()) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(AwaitNarrowing(std::move(missing), start, deadline));
    // Of several keys, one may have been removed again before the last one appeared.
    if (keys.size() == 1) return absl::OkStatus();
  }
}

absl::StatusOr<int64_t> RedisKeyValueStore::NumKeys(absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                       Run({"HLEN", values_key_}, true, DeadlineOf(timeout)));
  return reply.AsInteger();
}

absl::StatusOr<std::vector<std::string>> RedisKeyValueStore::ListKeys(absl::Duration timeout) {
  const absl::Time deadline = DeadlineOf(timeout);
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  std::set<std::string> keys;  // a scan may name a key twice
  std::string cursor = "0";
  do {
    DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                         connection_->Eval(Script<scripts::kListKeys>(), {values_key_},
                                           {cursor, kKeysPerPage}, CallOptions(true, deadline)));
    DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> page, reply.AsArray());
    if (page.size() != 2) return absl::InternalError("Redis answered a scan out of shape");
    DDP_ASSIGN_OR_RETURN(cursor, page[0].AsString());
    DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> names, page[1].AsArray());
    for (const RedisReply& name : names) {
      DDP_ASSIGN_OR_RETURN(std::string key, name.AsString());
      keys.insert(std::move(key));
    }
    if (cursor != "0" && clock_.Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("listing the store's keys: ", keys.size(), " seen so far"));
    }
  } while (cursor != "0");
  return std::vector<std::string>(keys.begin(), keys.end());
}

absl::Status RedisKeyValueStore::RefreshTtl(absl::Duration timeout) {
  return Run({"PEXPIRE", values_key_, Ttl()}, true, DeadlineOf(timeout)).status();
}

// Queues. ----------------------------------------------------------------------------------------

absl::Status RedisKeyValueStore::QueuePush(const std::string& key, const std::string& value,
                                           absl::Duration timeout) {
  return Change(key, {"RPUSH", QueueKey(key), value}, false, DeadlineOf(timeout)).status();
}

absl::StatusOr<std::string> RedisKeyValueStore::QueuePop(const std::string& key,
                                                         absl::Duration timeout) {
  const absl::Time deadline = DeadlineOf(timeout);
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  DDP_ASSIGN_OR_RETURN(RedisReply reply, AwaitOne(key, {"LPOP", QueueKey(key)}, false, deadline));
  return std::move(reply).AsString();
}

absl::StatusOr<std::optional<std::string>> RedisKeyValueStore::QueueTryPop(const std::string& key,
                                                                           absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(RedisReply reply, Run({"LPOP", QueueKey(key)}, false, DeadlineOf(timeout)));
  if (reply.IsNil()) return std::optional<std::string>();
  DDP_ASSIGN_OR_RETURN(std::string value, std::move(reply).AsString());
  return std::optional<std::string>(std::move(value));
}

absl::StatusOr<int64_t> RedisKeyValueStore::QueueLength(const std::string& key,
                                                        absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                       Run({"LLEN", QueueKey(key)}, true, DeadlineOf(timeout)));
  return reply.AsInteger();
}

// Names and deadlines. ---------------------------------------------------------------------------

std::string RedisKeyValueStore::QueueKey(const std::string& key) const {
  return absl::StrCat(address_.prefix, "queue:", key);
}

std::string RedisKeyValueStore::Channel(const std::string& key) const {
  return absl::StrCat(channels_, key);
}

std::string RedisKeyValueStore::Ttl() const {
  return absl::StrCat(absl::ToInt64Milliseconds(options_.key_ttl));
}

absl::Time RedisKeyValueStore::DeadlineOf(absl::Duration timeout) const {
  return clock_.Now() + timeout;
}

RedisCallOptions RedisKeyValueStore::CallOptions(bool idempotent, absl::Time deadline) const {
  RedisCallOptions call;
  call.idempotent = idempotent;
  call.total_timeout = std::max(deadline - clock_.Now(), kShortestAnswerTime);
  // A command that must not be sent again has the whole time for its only attempt.
  if (!idempotent) call.command_timeout = call.total_timeout;
  return call;
}

absl::Status RedisKeyValueStore::TimedOut(const std::vector<std::string>& missing,
                                          absl::Time start) const {
  const size_t named = std::min(missing.size(), kMaxNamedKeys);
  const std::string names = absl::StrJoin(missing.begin(), missing.begin() + named, ", ");
  const std::string more =
      missing.size() > named ? absl::StrCat(" and ", missing.size() - named, " more") : "";
  const absl::Duration waited = absl::Trunc(clock_.Now() - start, absl::Milliseconds(1));
  return absl::DeadlineExceededError(absl::StrCat(
      "wait timeout after ", absl::FormatDuration(waited), ": missing keys: ", names, more,
      " (in Redis at ", address_.endpoint.DebugString(), " under ", address_.prefix, ")"));
}

// Commands. --------------------------------------------------------------------------------------

absl::Status RedisKeyValueStore::RenewWhenDue(absl::Time deadline) {
  {
    const MutexLock lock(mutex_);
    const absl::Time now = clock_.Now();
    if (now - renewed_ < renewal_interval_) return absl::OkStatus();
    renewed_ = now;
  }
  const std::vector<std::string> command = {"PEXPIRE", values_key_, Ttl()};
  return connection_->Command(command, CallOptions(true, deadline)).status();
}

absl::StatusOr<RedisReply> RedisKeyValueStore::Run(const std::vector<std::string>& command,
                                                   bool idempotent, absl::Time deadline) {
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  return connection_->Command(command, CallOptions(idempotent, deadline));
}

absl::StatusOr<RedisReply> RedisKeyValueStore::Change(const std::string& key,
                                                      const std::vector<std::string>& command,
                                                      bool idempotent, absl::Time deadline) {
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies,
                       connection_->Transaction(
                           {command, {"PEXPIRE", command[1], Ttl()}, {"PUBLISH", Channel(key), ""}},
                           CallOptions(idempotent, deadline)));
  return std::move(replies.front());
}

absl::StatusOr<RedisReply> RedisKeyValueStore::ChangeByScript(const RedisScript& script,
                                                              const std::vector<std::string>& args,
                                                              bool idempotent,
                                                              absl::Time deadline) {
  DDP_RETURN_IF_ERROR(RenewWhenDue(deadline));
  std::vector<std::string> all = {Ttl(), channels_};
  all.insert(all.end(), args.begin(), args.end());
  return connection_->Eval(script, {values_key_}, all, CallOptions(idempotent, deadline));
}

// Waits. -----------------------------------------------------------------------------------------

RedisKeyValueStore::Question RedisKeyValueStore::WhichValues(
    const std::vector<std::string>& keys, const std::vector<size_t>& places) const {
  Question question = {"HMGET", values_key_};
  question.reserve(question.size() + places.size());
  for (const size_t place : places) question.push_back(keys[place]);
  return question;
}

std::vector<std::string> RedisKeyValueStore::KeysOfWait(
    const std::vector<std::string>& keys) const {
  std::vector<std::string> all = {values_key_};
  all.reserve(keys.size() + 1);
  for (const std::string& key : keys) all.push_back(QueueKey(key));
  return all;
}

// Names the script (EVALSHA), because a server that ddprun has started accepts no source.
RedisKeyValueStore::Question RedisKeyValueStore::WhichAreMissing(
    const std::vector<std::string>& keys) const {
  Question question = {"EVALSHA", Script<scripts::kMissingKeys>().sha1_hex(),
                       absl::StrCat(keys.size() + 1)};
  const std::vector<std::string> places = KeysOfWait(keys);
  question.insert(question.end(), places.begin(), places.end());
  question.insert(question.end(), keys.begin(), keys.end());
  return question;
}

// Blocks until each of the missing keys has been present once.
absl::Status RedisKeyValueStore::AwaitNarrowing(std::vector<std::string> missing, absl::Time start,
                                                absl::Time deadline) {
  while (!missing.empty()) {
    if (clock_.Now() >= deadline) return TimedOut(missing, start);
    const std::string chosen = missing[Draw(missing.size())];
    const IsAnswer chosen_has_come = [&](const RedisReply& reply) {
      const auto still = Pick(missing, reply);
      return !still.ok() || std::find(still->begin(), still->end(), chosen) == still->end();
    };
    const Question question = WhichAreMissing(missing);
    bool asked = false;
    absl::StatusOr<RedisReply> reply =
        connection_->AskOnPush(Channel(chosen), question, chosen_has_come, deadline, asked);
    // A restarted server does not know the script; Eval() sends the source.
    if (IsTransient(reply.status()) || absl::IsNotFound(reply.status())) {
      reply = connection_->Eval(Script<scripts::kMissingKeys>(), KeysOfWait(missing), missing,
                                CallOptions(true, deadline));
    }
    DDP_RETURN_IF_ERROR(reply.status());
    DDP_ASSIGN_OR_RETURN(missing, Pick(missing, *reply));
  }
  return absl::OkStatus();
}

size_t RedisKeyValueStore::Draw(size_t count) {
  const MutexLock lock(mutex_);
  return random_() % count;
}

// Asks `question`, which is about `key`, until the reply is not nil.
absl::StatusOr<RedisReply> RedisKeyValueStore::AwaitOne(const std::string& key,
                                                        const Question& question, bool idempotent,
                                                        absl::Time deadline) {
  const absl::Time start = clock_.Now();
  absl::StatusOr<RedisReply> reply =
      connection_->Command(question, CallOptions(idempotent, deadline));
  while (reply.ok() && reply->IsNil()) {
    if (clock_.Now() >= deadline) return TimedOut({key}, start);
    bool asked = false;
    reply = connection_->AskOnPush(Channel(key), question, HasCome, deadline, asked);
    if (!IsTransient(reply.status())) continue;
    // If `asked` is false, no question was lost, so even one that changes data may be repeated.
    if (asked && !idempotent) {
      return absl::Status(reply.status().code(),
                          absl::StrCat(reply.status().message(), "; ", question[0],
                                       " may or may not have been applied"));
    }
    reply = connection_->Command(question, CallOptions(idempotent, deadline));
  }
  return reply;
}

// Blocks until the keys at the places `missing` have values, and stores them in `values`.
absl::Status RedisKeyValueStore::AwaitValues(const std::vector<std::string>& keys,
                                             std::vector<size_t> missing, absl::Time start,
                                             absl::Time deadline,
                                             std::vector<std::string>& values) {
  absl::StatusOr<RedisReply> reply =
      connection_->Command(WhichValues(keys, missing), CallOptions(true, deadline));
  while (true) {
    DDP_RETURN_IF_ERROR(reply.status());
    DDP_RETURN_IF_ERROR(TakeValues(*std::move(reply), missing, values));
    if (missing.empty()) return absl::OkStatus();
    if (clock_.Now() >= deadline) return TimedOut(NamesOf(keys, missing), start);
    const size_t chosen = Draw(missing.size());
    const Question question = WhichValues(keys, missing);
    const IsAnswer chosen_has_come = [&](const RedisReply& answer) {
      const auto elements = answer.AsArray();
      return !elements.ok() || chosen >= elements->size() || HasCome((*elements)[chosen]);
    };
    bool asked = false;
    reply = connection_->AskOnPush(Channel(keys[missing[chosen]]), question, chosen_has_come,
                                   deadline, asked);
    if (IsTransient(reply.status())) {
      reply = connection_->Command(question, CallOptions(true, deadline));
    }
  }
}

std::vector<RedisScript> KeyValueScripts() {
  return {Script<scripts::kAppendValue>(), Script<scripts::kCompareSetValue>(),
          Script<scripts::kListKeys>(), Script<scripts::kMissingKeys>(),
          Script<scripts::kSetValues>()};
}

}  // namespace ddp::store
