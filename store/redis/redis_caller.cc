#include "store/redis/redis_caller.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/duration_text.h"
#include "base/status_macros.h"
#include "store/redis/redis_errors.h"

namespace ddp::store {
namespace {

// What a call has at least for a server that is away.
constexpr absl::Duration kLeastWait = absl::Seconds(1);

const RedisReply* FirstPassingRefusal(const std::vector<RedisReply>& replies) {
  for (const RedisReply& reply : replies) {
    if (reply.IsError() && IsTransientRefusal(reply.error_text())) return &reply;
  }
  return nullptr;
}

// Returns true for a transaction of which no command was applied.
bool IsAbortedTransaction(const std::vector<RedisReply>& replies) {
  return !replies.empty() && IsTransactionAborted(replies.back().error_text());
}

std::vector<std::string> EvalCommand(const char* verb, const std::string& script,
                                     const std::vector<std::string>& keys,
                                     const std::vector<std::string>& args) {
  std::vector<std::string> command = {verb, script, absl::StrCat(keys.size())};
  command.insert(command.end(), keys.begin(), keys.end());
  command.insert(command.end(), args.begin(), args.end());
  return command;
}

}  // namespace

absl::StatusOr<RedisReply> RedisCaller::Command(const std::vector<std::string>& args,
                                                const RedisCallOptions& call) {
  std::string bytes;
  AppendRedisCommand(args, bytes);
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies, Call({.bytes = std::move(bytes),
                                                              .replies = 1,
                                                              .what = args.empty() ? "" : args[0],
                                                              .call = call}));
  DDP_RETURN_IF_ERROR(FirstError(replies));
  return std::move(replies.front());
}

absl::StatusOr<std::vector<RedisReply>> RedisCaller::Pipeline(
    const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call) {
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies,
                       Call({.bytes = RedisWireForm(commands),
                             .replies = commands.size(),
                             .what = commands.empty() || commands[0].empty() ? "" : commands[0][0],
                             .call = call}));
  DDP_RETURN_IF_ERROR(FirstError(replies));
  return replies;
}

absl::Status RedisCaller::FirstError(const std::vector<RedisReply>& replies) const {
  for (const RedisReply& reply : replies) {
    if (reply.IsError()) return StatusOfErrorReply(reply.error_text(), endpoint_);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RedisReply>> RedisCaller::Transaction(
    const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call) {
  std::string bytes;
  AppendRedisCommand({"MULTI"}, bytes);
  bytes.append(RedisWireForm(commands));
  AppendRedisCommand({"EXEC"}, bytes);
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies, Call({.bytes = std::move(bytes),
                                                              .replies = commands.size() + 2,
                                                              .what = "the transaction",
                                                              .call = call}));
  DDP_RETURN_IF_ERROR(FirstError(replies));
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> results, std::move(replies.back()).AsArray());
  if (results.size() != commands.size()) {
    return absl::InternalError(absl::StrCat("Redis at ", endpoint_.DebugString(), " answered ",
                                            results.size(), " replies to a transaction of ",
                                            commands.size()));
  }
  DDP_RETURN_IF_ERROR(FirstError(results));
  return results;
}

absl::StatusOr<RedisReply> RedisCaller::Eval(const RedisScript& script,
                                             const std::vector<std::string>& keys,
                                             const std::vector<std::string>& args,
                                             const RedisCallOptions& call) {
  RedisCallOptions left = WithDefaults(call);
  const absl::Time deadline = clock_.Now() + left.total_timeout;
  std::string bytes;
  AppendRedisCommand(EvalCommand("EVALSHA", script.sha1_hex(), keys, args), bytes);
  DDP_ASSIGN_OR_RETURN(
      std::vector<RedisReply> replies,
      Call({.bytes = std::move(bytes), .replies = 1, .what = "EVALSHA", .call = left}));
  if (IsUnknownScript(replies[0].error_text())) {
    if (left.total_timeout > absl::ZeroDuration()) {
      left.total_timeout = std::max(deadline - clock_.Now(), absl::Milliseconds(1));
    }
    return Command(EvalCommand("EVAL", script.source(), keys, args), left);
  }
  if (replies[0].IsError()) return StatusOfErrorReply(replies[0].error_text(), endpoint_);
  return std::move(replies[0]);
}

RedisCallOptions RedisCaller::WithDefaults(RedisCallOptions call) const {
  if (call.command_timeout < absl::ZeroDuration()) call.command_timeout = options_.command_timeout;
  if (call.total_timeout < absl::ZeroDuration()) call.total_timeout = options_.total_timeout;
  return call;
}

absl::StatusOr<std::vector<RedisReply>> RedisCaller::Call(Request request) {
  request.call = WithDefaults(request.call);
  const RedisCallOptions& call = request.call;
  const bool once = call.total_timeout <= absl::ZeroDuration();
  const absl::Time start = clock_.Now();
  const absl::Time deadline = once ? absl::InfiniteFuture() : DeadlineOf(call, start);
  absl::Status last;
  for (int attempt = 1;; ++attempt) {
    bool sent = false;
    const absl::Time begun = clock_.Now();
    absl::StatusOr<std::vector<RedisReply>> result = TryOnce(request, deadline, sent);
    NoteAttempt(begun, result.status());
    if (result.ok()) {
      const RedisReply* refusal = FirstPassingRefusal(*result);
      // The other commands of a pipeline may have been applied.
      const bool all_refused = request.replies == 1 || IsAbortedTransaction(*result);
      if (refusal == nullptr || (!all_refused && !call.idempotent)) return result;
      last = StatusOfErrorReply(refusal->error_text(), endpoint_);
    } else {
      last = result.status();
      if (!IsTransient(last)) return last;
      if (sent && !call.idempotent) {
        return absl::Status(last.code(), absl::StrCat(last.message(), "; ", request.what,
                                                      " may or may not have been applied"));
      }
    }
    if (once || !Pause(attempt, deadline)) return GiveUp(last, attempt, start);
  }
}

absl::Time RedisCaller::DeadlineOf(const RedisCallOptions& call, absl::Time start) {
  const MutexLock lock(mutex_);
  // After a long silence nobody knows whether the server has been away all the time.
  if (start - last_failure_ > call.total_timeout) away_since_ = absl::InfiniteFuture();
  const absl::Time least = start + std::min(call.total_timeout, kLeastWait);
  return std::max(least, std::min(start, away_since_) + call.total_timeout);
}

void RedisCaller::NoteAttempt(absl::Time begun, const absl::Status& result) {
  const MutexLock lock(mutex_);
  if (result.ok()) {
    away_since_ = absl::InfiniteFuture();
  } else if (absl::IsUnavailable(result)) {
    away_since_ = std::min(away_since_, begun);
    last_failure_ = clock_.Now();
  }
}

absl::Status RedisCaller::GiveUp(const absl::Status& last, int attempts, absl::Time start) {
  const absl::Time now = clock_.Now();
  std::string tried =
      absl::StrCat(attempts, attempts == 1 ? " time in " : " times in ", DurationText(now - start));
  const MutexLock lock(mutex_);
  if (away_since_ < start) absl::StrAppend(&tried, ", away for ", DurationText(now - away_since_));
  return absl::Status(last.code(), absl::StrCat(last.message(), " (tried ", tried, ")"));
}

// Waits before the next attempt (full jitter: see RedisConnectionOptions). Returns false when there
// is no time left for one.
bool RedisCaller::Pause(int attempt, absl::Time deadline) const {
  const absl::Duration left = deadline - clock_.Now();
  if (left < absl::Milliseconds(1)) return false;
  const absl::Duration longest = std::min(
      options_.backoff_max, options_.backoff_initial * (int64_t{1} << std::min(attempt, 20)));
  std::random_device random;
  const double part = std::uniform_real_distribution<double>(0.0, 1.0)(random);
  // At most half of the time left, so that the last attempt starts before the deadline.
  const absl::Duration pause = std::min(longest * part, left / 2);
  ::ddp::Pause(pause);
  return true;
}

}  // namespace ddp::store
