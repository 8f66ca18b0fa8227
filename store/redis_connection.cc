#include "store/redis_connection.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "store/redis_errors.h"
#include "store/redis_socket.h"

namespace ddp::store {
namespace {

constexpr size_t kReceiveBytes = 32 * 1024;
// A reply is first awaited in recv() itself, this long: a system call less than to poll before it.
constexpr absl::Duration kBlockingReceive = absl::Milliseconds(100);
// Between two questions for the name of a server that is away.
constexpr absl::Duration kNamePause = absl::Seconds(30);

// "$5\r\n" and the like: a mark, a number, a line end.
void AppendHeader(char mark, size_t number, std::string& out) {
  char digits[24];
  const std::to_chars_result end = std::to_chars(digits, digits + sizeof(digits), number);
  out.push_back(mark);
  out.append(digits, end.ptr);
  out.append("\r\n");
}

// The wire form of a command (RESP2): an array of byte strings.
void AppendCommand(const std::vector<std::string>& args, std::string& out) {
  size_t size = out.size() + 16;
  for (const std::string& arg : args) size += arg.size() + 16;
  if (size > out.capacity()) out.reserve(std::max(size, 2 * out.capacity()));
  AppendHeader('*', args.size(), out);
  for (const std::string& arg : args) {
    AppendHeader('$', arg.size(), out);
    out.append(arg);
    out.append("\r\n");
  }
}

std::string WireForm(const std::vector<std::vector<std::string>>& commands) {
  std::string out;
  for (const std::vector<std::string>& command : commands) AppendCommand(command, out);
  return out;
}

bool IsPassing(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

const RedisReply* FirstPassingRefusal(const std::vector<RedisReply>& replies) {
  for (const RedisReply& reply : replies) {
    if (reply.IsError() && IsPassingRefusal(reply.error_text())) return &reply;
  }
  return nullptr;
}

// Whether this is a transaction of which nothing was applied.
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

RedisConnection::RedisConnection(const RedisEndpoint& endpoint, const Options& options)
    : endpoint_(endpoint),
      options_(options),
      reader_(options.limits),
      jitter_(std::random_device()()) {}

RedisConnection::~RedisConnection() = default;

absl::StatusOr<std::unique_ptr<RedisConnection>> RedisConnection::Connect(
    const RedisEndpoint& endpoint, const Options& options) {
  std::unique_ptr<RedisConnection> connection(new RedisConnection(endpoint, options));
  DDP_RETURN_IF_ERROR(connection->Reconnect());
  return connection;
}

absl::Status RedisConnection::Reconnect(const RedisCallOptions& call) {
  // A call of no commands is nothing but its connection.
  return Call("", 0, "connecting", call).status();
}

void RedisConnection::Disconnect() {
  fd_.reset();
  reader_.Reset();
}

absl::StatusOr<RedisReply> RedisConnection::Command(const std::vector<std::string>& args,
                                                    const RedisCallOptions& call) {
  std::string request;
  AppendCommand(args, request);
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies,
                       Call(request, 1, args.empty() ? "" : args[0], call));
  DDP_RETURN_IF_ERROR(FirstError(replies));
  return std::move(replies.front());
}

absl::StatusOr<std::vector<RedisReply>> RedisConnection::Pipeline(
    const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call) {
  const std::string what = commands.empty() || commands[0].empty() ? "" : commands[0][0];
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies,
                       Call(WireForm(commands), commands.size(), what, call));
  DDP_RETURN_IF_ERROR(FirstError(replies));
  return replies;
}

absl::Status RedisConnection::FirstError(const std::vector<RedisReply>& replies) const {
  for (const RedisReply& reply : replies) {
    if (reply.IsError()) return StatusOfErrorReply(reply.error_text(), endpoint_);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RedisReply>> RedisConnection::Transaction(
    const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call) {
  std::string request;
  AppendCommand({"MULTI"}, request);
  request.append(WireForm(commands));
  AppendCommand({"EXEC"}, request);
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies,
                       Call(request, commands.size() + 2, "the transaction", call));
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

absl::StatusOr<RedisReply> RedisConnection::Eval(const RedisScript& script,
                                                 const std::vector<std::string>& keys,
                                                 const std::vector<std::string>& args,
                                                 const RedisCallOptions& call) {
  RedisCallOptions left = WithDefaults(call);
  const absl::Time deadline = clock_.Now() + left.total_timeout;
  std::string request;
  AppendCommand(EvalCommand("EVALSHA", script.sha1_hex(), keys, args), request);
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> replies, Call(request, 1, "EVALSHA", left));
  if (IsUnknownScript(replies[0].error_text())) {
    if (left.total_timeout > absl::ZeroDuration()) {
      left.total_timeout = std::max(deadline - clock_.Now(), absl::Milliseconds(1));
    }
    return Command(EvalCommand("EVAL", script.source(), keys, args), left);
  }
  if (replies[0].IsError()) return StatusOfErrorReply(replies[0].error_text(), endpoint_);
  return std::move(replies[0]);
}

absl::Status RedisConnection::Send(const std::vector<std::vector<std::string>>& commands) {
  if (!connected()) {
    return absl::UnavailableError(
        absl::StrCat("not connected to Redis at ", endpoint_.DebugString()));
  }
  bool sent = false;
  const absl::Status status =
      Write(WireForm(commands), clock_.Now() + options_.command_timeout, sent);
  if (!status.ok()) Disconnect();
  return status;
}

absl::StatusOr<RedisReply> RedisConnection::Receive(absl::Duration timeout) {
  if (!connected()) {
    return absl::UnavailableError(
        absl::StrCat("not connected to Redis at ", endpoint_.DebugString()));
  }
  RedisReply reply;
  const absl::Status status = Read(clock_.Now() + timeout, reply);
  if (status.ok()) return reply;
  if (!absl::IsDeadlineExceeded(status)) Disconnect();
  return status;
}

RedisCallOptions RedisConnection::WithDefaults(RedisCallOptions call) const {
  if (call.command_timeout < absl::ZeroDuration()) call.command_timeout = options_.command_timeout;
  if (call.total_timeout < absl::ZeroDuration()) call.total_timeout = options_.total_timeout;
  return call;
}

absl::StatusOr<std::vector<RedisReply>> RedisConnection::Call(const std::string& request,
                                                              size_t replies,
                                                              const std::string& what,
                                                              const RedisCallOptions& given) {
  const RedisCallOptions call = WithDefaults(given);
  const bool once = call.total_timeout <= absl::ZeroDuration();
  const absl::Time start = clock_.Now();
  const absl::Time deadline = once ? absl::InfiniteFuture() : start + call.total_timeout;
  absl::Status last;
  for (int attempt = 1;; ++attempt) {
    bool sent = false;
    absl::StatusOr<std::vector<RedisReply>> result =
        TryOnce(request, replies, call, deadline, sent);
    if (result.ok()) {
      const RedisReply* refusal = FirstPassingRefusal(*result);
      // Of a pipeline the other commands may have been applied.
      const bool all_refused = replies == 1 || IsAbortedTransaction(*result);
      if (refusal == nullptr || (!all_refused && !call.idempotent)) return result;
      last = StatusOfErrorReply(refusal->error_text(), endpoint_);
    } else {
      last = result.status();
      Disconnect();
      if (!IsPassing(last)) return last;
      if (sent && !call.idempotent) {
        return absl::Status(last.code(), absl::StrCat(last.message(), "; ", what,
                                                      " may or may not have been applied"));
      }
    }
    if (once || !Pause(attempt, deadline)) return GiveUp(last, attempt, clock_.Now() - start);
  }
}

absl::Status RedisConnection::GiveUp(const absl::Status& last, int attempts,
                                     absl::Duration tried) const {
  const absl::Duration shown = absl::Trunc(tried, absl::Milliseconds(1));
  return absl::Status(last.code(), absl::StrCat(last.message(), " (tried ", attempts,
                                                attempts == 1 ? " time in " : " times in ",
                                                absl::FormatDuration(shown), ")"));
}

// `sent`: whether the server may have got any of the request.
absl::StatusOr<std::vector<RedisReply>> RedisConnection::TryOnce(const std::string& request,
                                                                 size_t replies,
                                                                 const RedisCallOptions& call,
                                                                 absl::Time deadline, bool& sent) {
  // What may be sent twice need not be preceded by a look whether the connection still stands.
  if (!connected() || (!call.idempotent && !StillOpen())) {
    DDP_RETURN_IF_ERROR(MakeConnection(deadline));
  }
  const absl::Time attempt_deadline = std::min(deadline, clock_.Now() + call.command_timeout);
  DDP_RETURN_IF_ERROR(Write(request, attempt_deadline, sent));
  std::vector<RedisReply> result;
  result.reserve(replies);
  while (result.size() < replies) {
    DDP_RETURN_IF_ERROR(Read(attempt_deadline, result.emplace_back()));
  }
  return result;
}

// Asking for a host's name may take many seconds where the network is broken, and cannot be cut
// short. So the address that the server had is tried again and again, and its name only now and
// then.
absl::StatusOr<UniqueFd> RedisConnection::ConnectAgain(absl::Time deadline) {
  const absl::Time now = clock_.Now();
  RedisEndpoint endpoint = endpoint_;
  if (!known_address_.empty() && now < name_due_) endpoint.host = known_address_;
  absl::StatusOr<UniqueFd> fd = ConnectSocket(endpoint, deadline);
  if (fd.ok()) {
    known_address_ = PeerAddress(fd->get());
    name_due_ = absl::InfiniteFuture();
  } else if (now >= name_due_ || name_due_ == absl::InfiniteFuture()) {
    name_due_ = now + kNamePause;
  }
  return fd;
}

absl::Status RedisConnection::MakeConnection(absl::Time deadline) {
  Disconnect();
  const absl::Time attempt_deadline = std::min(deadline, clock_.Now() + options_.connect_timeout);
  DDP_ASSIGN_OR_RETURN(fd_, ConnectAgain(attempt_deadline));
  DDP_RETURN_IF_ERROR(LimitBlocking(fd_.get(), kBlockingReceive));
  const absl::Status greeted = Greet(attempt_deadline);
  if (!greeted.ok()) Disconnect();
  return greeted;
}

// A server that was restarted since our last command has closed the connection. To see that before
// sending is what lets a command go on that must not be sent twice.
bool RedisConnection::StillOpen() const {
  char byte = 0;
  const ssize_t got = recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  // Bytes that nobody asked for (a last word before closing) would be taken for the next reply.
  return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
}

absl::Status RedisConnection::Greet(absl::Time deadline) {
  std::vector<std::vector<std::string>> commands;
  if (!endpoint_.password.empty() && !endpoint_.user.empty()) {
    commands.push_back({"AUTH", endpoint_.user, endpoint_.password});
  } else if (!endpoint_.password.empty()) {
    commands.push_back({"AUTH", endpoint_.password});
  }
  if (endpoint_.database != 0) commands.push_back({"SELECT", absl::StrCat(endpoint_.database)});
  if (!options_.client_name.empty())
    commands.push_back({"CLIENT", "SETNAME", options_.client_name});
  // Who answers, is it Redis, and are we welcome?
  commands.push_back({"PING"});
  bool sent = false;
  DDP_RETURN_IF_ERROR(Write(WireForm(commands), deadline, sent));
  absl::Status result;
  for (const std::vector<std::string>& command : commands) {
    RedisReply reply;
    DDP_RETURN_IF_ERROR(Read(deadline, reply));
    // The name is a courtesy: a user may lack the right to set it.
    const bool courtesy = command[0] == "CLIENT";
    if (result.ok() && reply.IsError() && !courtesy) {
      result = StatusOfErrorReply(reply.error_text(), endpoint_);
    }
  }
  return result;
}

absl::Status RedisConnection::Write(const std::string& bytes, absl::Time deadline, bool& sent) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count =
        send(fd_.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      done += count;
      sent = true;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!AwaitSocket(fd_.get(), POLLOUT, deadline)) {
        return absl::DeadlineExceededError(
            absl::StrCat("Redis at ", endpoint_.DebugString(), " does not take what we send"));
      }
    } else if (errno != EINTR) {
      return ConnectionError("the connection broke to", endpoint_, errno);
    }
  }
  return absl::OkStatus();
}

absl::Status RedisConnection::Read(absl::Time deadline, RedisReply& reply) {
  bool may_block = deadline - clock_.Now() > kBlockingReceive;
  while (true) {
    const absl::StatusOr<bool> complete = reader_.Next(reply);
    if (!complete.ok()) {
      return absl::Status(
          complete.status().code(),
          absl::StrCat("Redis at ", endpoint_.DebugString(), ": ", complete.status().message()));
    }
    if (*complete) return absl::OkStatus();
    if (!may_block && !AwaitSocket(fd_.get(), POLLIN, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("Redis at ", endpoint_.DebugString(), " did not answer in time"));
    }
    DDP_RETURN_IF_ERROR(ReceiveBytes(may_block));
    may_block = false;
  }
}

// What has come. With `may_block`, waits for it, but not for longer than kBlockingReceive.
absl::Status RedisConnection::ReceiveBytes(bool may_block) {
  char buffer[kReceiveBytes];
  const ssize_t count = recv(fd_.get(), buffer, sizeof(buffer), may_block ? 0 : MSG_DONTWAIT);
  if (count > 0) return reader_.Feed(buffer, count);
  if (count == 0) {
    return absl::UnavailableError(
        absl::StrCat("Redis at ", endpoint_.DebugString(), " closed the connection"));
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return absl::OkStatus();
  return ConnectionError("the connection broke to", endpoint_, errno);
}

// Full jitter: see Options. Returns false when there is no time left for another attempt.
bool RedisConnection::Pause(int attempt, absl::Time deadline) {
  const absl::Duration left = deadline - clock_.Now();
  if (left < absl::Milliseconds(1)) return false;
  const absl::Duration longest = std::min(
      options_.backoff_max, options_.backoff_initial * (int64_t{1} << std::min(attempt, 20)));
  const double part = std::uniform_real_distribution<double>(0.0, 1.0)(jitter_);
  // At most half of what is left, so that the last attempt falls near the deadline, not past it.
  const absl::Duration pause = std::min(longest * part, left / 2);
  AwaitSocket(-1, 0, clock_.Now() + pause);
  return true;
}

}  // namespace ddp::store
