#include "store/redis_key_value_store.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "store/key_value_scripts.h"
#include "store/redis_errors.h"

namespace ddp::store {
namespace {

namespace scripts = ::ddp::embedded::key_value_scripts;

// A connection more than this would only be kept for threads that rarely meet.
constexpr size_t kMaxIdleConnections = 1;
constexpr absl::Duration kShortestAnswerTime = absl::Seconds(1);
constexpr size_t kMaxNamedKeys = 8;
constexpr char kKeysPerPage[] = "1000";

// Immutable, and never destroyed, so that they serve a store that lives as long as the process.
template <const char* source>
const RedisScript& Script() {
  static const RedisScript* const kScript = new RedisScript(source);
  return *kScript;
}

bool HasCome(const RedisReply& reply) { return !reply.IsNil(); }

// The keys that missing_keys.lua found missing among `asked`.
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

// Moves the values that have come to their places, and takes these out of `missing`, for which the
// reply was asked.
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

// A push about a channel: ["message", channel, payload], ["unsubscribe", channel, count] and so on.
bool IsPush(const RedisReply& reply, const std::string& kind) {
  const auto parts = reply.AsArray();
  if (!parts.ok() || parts->size() != 3) return false;
  const auto name = (*parts)[0].AsString();
  return name.ok() && *name == kind;
}

absl::StatusOr<RedisReply> ReceiveNoError(RedisConnection& connection) {
  DDP_ASSIGN_OR_RETURN(RedisReply reply, connection.Receive(connection.options().command_timeout));
  if (reply.IsError()) return StatusOfErrorReply(reply.error_text(), connection.endpoint());
  return reply;
}

// Subscribes and asks in one atomic step; returns the answer.
absl::StatusOr<RedisReply> SubscribeAndAsk(RedisConnection& connection, const std::string& channel,
                                           const std::vector<std::string>& question) {
  DDP_RETURN_IF_ERROR(connection.Send({{"MULTI"}, {"SUBSCRIBE", channel}, question, {"EXEC"}}));
  for (int i = 0; i < 3; ++i) {  // OK, QUEUED, QUEUED
    DDP_RETURN_IF_ERROR(ReceiveNoError(connection).status());
  }
  DDP_ASSIGN_OR_RETURN(RedisReply executed, ReceiveNoError(connection));
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> both, std::move(executed).AsArray());
  if (both.size() != 2) return absl::InternalError("Redis answered EXEC out of shape");
  if (both[1].IsError()) return StatusOfErrorReply(both[1].error_text(), connection.endpoint());
  return std::move(both[1]);
}

// Reads over pushes that are still on their way, up to the end of the subscription.
absl::Status AwaitUnsubscribed(RedisConnection& connection) {
  while (true) {
    DDP_ASSIGN_OR_RETURN(const RedisReply reply, ReceiveNoError(connection));
    if (IsPush(reply, "unsubscribe")) return absl::OkStatus();
  }
}

absl::Status Unsubscribe(RedisConnection& connection, const std::string& channel) {
  DDP_RETURN_IF_ERROR(connection.Send({{"UNSUBSCRIBE", channel}}));
  return AwaitUnsubscribed(connection);
}

// Sleeps until a push or for `timeout`, then ends the subscription and asks, in one round trip.
absl::StatusOr<RedisReply> AwaitPushAndAsk(RedisConnection& connection, const std::string& channel,
                                           const std::vector<std::string>& question,
                                           absl::Duration timeout) {
  const absl::Status pushed = connection.Receive(timeout).status();
  if (!pushed.ok() && !absl::IsDeadlineExceeded(pushed)) return pushed;
  DDP_RETURN_IF_ERROR(connection.Send({{"UNSUBSCRIBE", channel}, question}));
  DDP_RETURN_IF_ERROR(AwaitUnsubscribed(connection));
  return ReceiveNoError(connection);
}

}  // namespace

// A connection lent to one operation. Given back at the end, open or broken.
class RedisKeyValueStore::Borrowed {
 public:
  Borrowed(RedisKeyValueStore* store, std::unique_ptr<RedisConnection> connection)
      : store_(store), connection_(std::move(connection)) {}
  Borrowed(Borrowed&&) = default;
  ~Borrowed() {
    if (connection_ != nullptr) store_->GiveBack(std::move(connection_));
  }

  RedisConnection& operator*() const { return *connection_; }
  RedisConnection* operator->() const { return connection_.get(); }

 private:
  RedisKeyValueStore* store_;
  std::unique_ptr<RedisConnection> connection_;
};

RedisKeyValueStore::RedisKeyValueStore(const StoreAddress& address, const Options& options)
    : address_(address),
      options_(options),
      values_key_(absl::StrCat(address.prefix, "values")),
      channels_(absl::StrCat(address.prefix, "changed:")),
      renewal_interval_(options.key_ttl / 100),
      renewed_(clock_.Now()),
      random_(std::random_device()()) {}

RedisKeyValueStore::~RedisKeyValueStore() = default;

absl::StatusOr<std::unique_ptr<RedisKeyValueStore>> RedisKeyValueStore::Connect(
    const StoreAddress& address, const Options& options) {
  if (address.prefix.empty()) {
    return absl::InvalidArgumentError("the store's prefix is empty");
  }
  std::unique_ptr<RedisKeyValueStore> store(new RedisKeyValueStore(address, options));
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<RedisConnection> connection,
                       RedisConnection::Connect(address.endpoint, options.connection));
  store->GiveBack(std::move(connection));
  return store;
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
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  DDP_ASSIGN_OR_RETURN(RedisReply reply,
                       AwaitOne(*connection, key, {"HGET", values_key_, key}, true, deadline));
  return std::move(reply).AsString();
}

absl::StatusOr<std::vector<std::string>> RedisKeyValueStore::MultiGet(
    const std::vector<std::string>& keys, absl::Duration timeout) {
  std::vector<std::string> values(keys.size());
  if (keys.empty()) return values;
  const absl::Time start = clock_.Now();
  const absl::Time deadline = start + timeout;
  std::vector<size_t> missing(keys.size());  // places in `keys`
  std::iota(missing.begin(), missing.end(), 0);
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  absl::StatusOr<RedisReply> reply =
      connection->Command(WhichValues(keys, missing), CallOptions(true, deadline));
  while (true) {
    DDP_RETURN_IF_ERROR(reply.status());
    DDP_RETURN_IF_ERROR(TakeValues(*std::move(reply), missing, values));
    if (missing.empty()) return values;
    if (clock_.Now() >= deadline) return TimedOut(NamesOf(keys, missing), start);
    const size_t chosen = Draw(missing.size());
    const Question question = WhichValues(keys, missing);
    const IsAnswer chosen_has_come = [&](const RedisReply& answer) {
      const auto elements = answer.AsArray();
      return !elements.ok() || chosen >= elements->size() || HasCome((*elements)[chosen]);
    };
    reply = AskOnChange(*connection, keys[missing[chosen]], question, chosen_has_come, deadline);
    if (absl::IsUnavailable(reply.status())) {
      reply = connection->Command(question, CallOptions(true, deadline));
    }
  }
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
  DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                       Run(WhichAreMissing(keys), true, DeadlineOf(timeout)));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> missing, Pick(keys, reply));
  return missing.empty();
}

absl::Status RedisKeyValueStore::Wait(const std::vector<std::string>& keys,
                                      absl::Duration timeout) {
  if (keys.empty()) return absl::OkStatus();
  const absl::Time start = clock_.Now();
  const absl::Time deadline = start + timeout;
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  while (true) {
    DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                         connection->Command(WhichAreMissing(keys), CallOptions(true, deadline)));
    DDP_ASSIGN_OR_RETURN(std::vector<std::string> missing, Pick(keys, reply));
    if (missing.empty()) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(AwaitNarrowing(*connection, std::move(missing), start, deadline));
    // One of several may be gone again when the last one has come.
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
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  std::set<std::string> keys;  // a scan may name a key twice
  std::string cursor = "0";
  do {
    DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                         connection->Eval(Script<scripts::kListKeys>(), {values_key_},
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
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  DDP_ASSIGN_OR_RETURN(RedisReply reply,
                       AwaitOne(*connection, key, {"LPOP", QueueKey(key)}, false, deadline));
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
  // What cannot be sent again gains nothing from being given up early.
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

// Connections. -----------------------------------------------------------------------------------

absl::StatusOr<RedisKeyValueStore::Borrowed> RedisKeyValueStore::Borrow(absl::Time deadline) {
  std::unique_ptr<RedisConnection> connection;
  bool renew = false;
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      connection = std::move(idle_.back());
      idle_.pop_back();
    }
    const absl::Time now = clock_.Now();
    renew = now - renewed_ >= renewal_interval_;
    if (renew) renewed_ = now;
  }
  if (connection == nullptr) {
    RedisConnectionOptions options = options_.connection;
    options.total_timeout = CallOptions(true, deadline).total_timeout;
    DDP_ASSIGN_OR_RETURN(connection, RedisConnection::Connect(address_.endpoint, options));
  }
  Borrowed borrowed(this, std::move(connection));
  if (renew) {
    const std::vector<std::string> command = {"PEXPIRE", values_key_, Ttl()};
    DDP_RETURN_IF_ERROR(borrowed->Command(command, CallOptions(true, deadline)).status());
  }
  return borrowed;
}

void RedisKeyValueStore::GiveBack(std::unique_ptr<RedisConnection> connection) {
  const MutexLock lock(mutex_);
  if (idle_.size() < kMaxIdleConnections) idle_.push_back(std::move(connection));
}

absl::StatusOr<RedisReply> RedisKeyValueStore::Run(const std::vector<std::string>& command,
                                                   bool idempotent, absl::Time deadline) {
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  return connection->Command(command, CallOptions(idempotent, deadline));
}

absl::StatusOr<RedisReply> RedisKeyValueStore::Change(const std::string& key,
                                                      const std::vector<std::string>& command,
                                                      bool idempotent, absl::Time deadline) {
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies,
                       connection->Transaction(
                           {command, {"PEXPIRE", command[1], Ttl()}, {"PUBLISH", Channel(key), ""}},
                           CallOptions(idempotent, deadline)));
  return std::move(replies.front());
}

absl::StatusOr<RedisReply> RedisKeyValueStore::ChangeByScript(const RedisScript& script,
                                                              const std::vector<std::string>& args,
                                                              bool idempotent,
                                                              absl::Time deadline) {
  DDP_ASSIGN_OR_RETURN(const Borrowed connection, Borrow(deadline));
  std::vector<std::string> all = {Ttl(), channels_};
  all.insert(all.end(), args.begin(), args.end());
  return connection->Eval(script, {values_key_}, all, CallOptions(idempotent, deadline));
}

// Waits. -----------------------------------------------------------------------------------------

RedisKeyValueStore::Question RedisKeyValueStore::WhichValues(
    const std::vector<std::string>& keys, const std::vector<size_t>& places) const {
  Question question = {"HMGET", values_key_};
  question.reserve(question.size() + places.size());
  for (const size_t place : places) question.push_back(keys[place]);
  return question;
}

// With its source, not by its name: inside MULTI there is no second try.
RedisKeyValueStore::Question RedisKeyValueStore::WhichAreMissing(
    const std::vector<std::string>& keys) const {
  Question question = {"EVAL", Script<scripts::kMissingKeys>().source(),
                       absl::StrCat(keys.size() + 1), values_key_};
  question.reserve(question.size() + 2 * keys.size());
  for (const std::string& key : keys) question.push_back(QueueKey(key));
  question.insert(question.end(), keys.begin(), keys.end());
  return question;
}

// Waits until each of the missing keys has been there once.
absl::Status RedisKeyValueStore::AwaitNarrowing(RedisConnection& connection,
                                                std::vector<std::string> missing, absl::Time start,
                                                absl::Time deadline) {
  while (!missing.empty()) {
    if (clock_.Now() >= deadline) return TimedOut(missing, start);
    const std::string chosen = missing[Draw(missing.size())];
    const IsAnswer chosen_has_come = [&](const RedisReply& reply) {
      const auto still = Pick(missing, reply);
      return !still.ok() || std::find(still->begin(), still->end(), chosen) == still->end();
    };
    const Question question = WhichAreMissing(missing);
    absl::StatusOr<RedisReply> reply =
        AskOnChange(connection, chosen, question, chosen_has_come, deadline);
    if (absl::IsUnavailable(reply.status())) {
      reply = connection.Command(question, CallOptions(true, deadline));
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

// Asks a question about one key until the answer is not nil.
absl::StatusOr<RedisReply> RedisKeyValueStore::AwaitOne(RedisConnection& connection,
                                                        const std::string& key,
                                                        const Question& question, bool idempotent,
                                                        absl::Time deadline) {
  const absl::Time start = clock_.Now();
  absl::StatusOr<RedisReply> reply =
      connection.Command(question, CallOptions(idempotent, deadline));
  while (reply.ok() && reply->IsNil()) {
    if (clock_.Now() >= deadline) return TimedOut({key}, start);
    reply = AskOnChange(connection, key, question, HasCome, deadline);
    if (absl::IsUnavailable(reply.status()) && idempotent) {
      reply = connection.Command(question, CallOptions(idempotent, deadline));
    }
  }
  return reply;
}

// Asks, and unless that is the answer, waits for a push about `key` or the deadline and asks again.
// Leaves the connection unsubscribed, or, when this failed, disconnected.
absl::StatusOr<RedisReply> RedisKeyValueStore::AskOnChange(RedisConnection& connection,
                                                           const std::string& key,
                                                           const Question& question,
                                                           const IsAnswer& is_answer,
                                                           absl::Time deadline) {
  const std::string channel = Channel(key);
  absl::StatusOr<RedisReply> reply = SubscribeAndAsk(connection, channel, question);
  if (reply.ok() && is_answer(*reply)) {
    // The answer stands, whatever becomes of the connection: it may have been taken from a queue.
    if (!Unsubscribe(connection, channel).ok()) connection.Disconnect();
    return reply;
  }
  if (reply.ok()) {
    reply = AwaitPushAndAsk(connection, channel, question, deadline - clock_.Now());
  }
  if (!reply.ok()) connection.Disconnect();
  return reply;
}

}  // namespace ddp::store
