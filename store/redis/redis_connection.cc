#include "store/redis/redis_connection.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/event_loop.h"
#include "base/status_macros.h"
#include "store/redis/redis_errors.h"

namespace ddp::store {
namespace {

// The socket itself blocks for this long before poll() is used. This saves a system call.
constexpr absl::Duration kBlockingReceive = absl::Milliseconds(100);

bool HasReplicaRefusal(const std::vector<RedisReply>& replies) {
  return std::any_of(replies.begin(), replies.end(), [](const RedisReply& reply) {
    return reply.IsError() && IsReplicaRefusal(reply.error_text());
  });
}

}  // namespace

RedisConnection::RedisConnection(const RedisEndpoint& endpoint, const Options& options)
    : RedisCaller(endpoint, options),
      dialer_(endpoint, options),
      wire_(options.resp3 ? RedisWire::Pushes::kDropped : RedisWire::Pushes::kAreReplies,
            options.limits) {}

RedisConnection::~RedisConnection() = default;

absl::StatusOr<std::unique_ptr<RedisConnection>> RedisConnection::Connect(
    const RedisEndpoint& endpoint, const Options& options) {
  std::unique_ptr<RedisConnection> connection(new RedisConnection(endpoint, options));
  DDP_RETURN_IF_ERROR(connection->Reconnect());
  return connection;
}

std::unique_ptr<RedisConnection> RedisConnection::Unconnected(const RedisEndpoint& endpoint,
                                                              const Options& options) {
  return std::unique_ptr<RedisConnection>(new RedisConnection(endpoint, options));
}

absl::Status RedisConnection::Reconnect(const RedisCallOptions& call) {
  // A call without commands only connects.
  return Call({.what = "connecting", .call = call}).status();
}

absl::StatusOr<RedisSocket> RedisConnection::Dial(absl::Time deadline) {
  Disconnect();
  absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
  if (!loop.ok()) return absl::UnavailableError(loop.status().message());
  absl::StatusOr<RedisSocket> result = absl::UnavailableError("the event loop has ended");
  dialer_.Dial(loop->get(), deadline, [&](absl::StatusOr<RedisSocket> socket) {
    result = std::move(socket);
    (*loop)->Stop();
  });
  const absl::Status ran = (*loop)->Run();
  dialer_.Cancel();
  DDP_RETURN_IF_ERROR(ran);
  if (result.ok()) DDP_RETURN_IF_ERROR(result->LimitBlocking(kBlockingReceive));
  return result;
}

RedisSocket RedisConnection::Release() {
  RedisSocket socket = std::move(socket_);
  Disconnect();
  return socket;
}

void RedisConnection::Disconnect() {
  socket_.reset();
  wire_.Reset();
}

absl::Status RedisConnection::Send(const std::vector<std::vector<std::string>>& commands) {
  if (!connected()) {
    return absl::UnavailableError(
        absl::StrCat("not connected to Redis at ", endpoint().DebugString()));
  }
  bool sent = false;
  const absl::Status status =
      Write(RedisWireForm(commands), clock_.Now() + options().command_timeout, sent);
  if (!status.ok()) Disconnect();
  return status;
}

absl::StatusOr<RedisReply> RedisConnection::Receive(absl::Duration timeout) {
  if (!connected()) {
    return absl::UnavailableError(
        absl::StrCat("not connected to Redis at ", endpoint().DebugString()));
  }
  RedisReply reply;
  const absl::Status status = Read(clock_.Now() + timeout, reply);
  if (status.ok()) return reply;
  if (!absl::IsDeadlineExceeded(status)) Disconnect();
  return status;
}

absl::StatusOr<std::vector<RedisReply>> RedisConnection::TryOnce(const Request& request,
                                                                 absl::Time deadline, bool& sent) {
  absl::StatusOr<std::vector<RedisReply>> replies = Exchange(request, deadline, sent);
  if (!replies.ok()) {
    Disconnect();
  } else if (HasReplicaRefusal(*replies)) {
    Disconnect();
    Doubt();
  }
  return replies;
}

absl::StatusOr<std::vector<RedisReply>> RedisConnection::Exchange(const Request& request,
                                                                  absl::Time deadline, bool& sent) {
  // A command that may be sent twice needs no check of the connection before it.
  if (!connected() || (!request.call.idempotent && !StillOpen())) {
    DDP_ASSIGN_OR_RETURN(socket_, Dial(deadline));
  }
  const absl::Time attempt_deadline =
      std::min(deadline, clock_.Now() + request.call.command_timeout);
  DDP_RETURN_IF_ERROR(Write(request.bytes, attempt_deadline, sent));
  std::vector<RedisReply> result;
  result.reserve(request.replies);
  while (result.size() < request.replies) {
    DDP_RETURN_IF_ERROR(Read(attempt_deadline, result.emplace_back()));
  }
  return result;
}

// Returns false when the server has closed the connection, as a restarted server has. When this is
// seen before sending, a command that must not be sent twice can still go on, on a new connection.
bool RedisConnection::StillOpen() {
  const absl::StatusOr<bool> has_input = socket_.HasInput(endpoint());
  // Unrequested bytes (a message before closing) would be read as the next reply.
  return has_input.ok() && !*has_input;
}

absl::Status RedisConnection::Write(const std::string& bytes, absl::Time deadline, bool& sent) {
  absl::string_view left = bytes;
  while (!left.empty()) {
    DDP_ASSIGN_OR_RETURN(const size_t count, socket_.Send(left, endpoint()));
    if (count > 0) {
      left.remove_prefix(count);
      sent = true;
    } else if (!AwaitSocket(fd(), POLLOUT, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("Redis at ", endpoint().DebugString(), " does not take what we send"));
    }
  }
  return absl::OkStatus();
}

absl::Status RedisConnection::Read(absl::Time deadline, RedisReply& reply) {
  bool may_block = deadline - clock_.Now() > kBlockingReceive;
  while (true) {
    const absl::StatusOr<bool> complete = wire_.NextReply(reply);
    if (!complete.ok()) {
      return absl::Status(
          complete.status().code(),
          absl::StrCat("Redis at ", endpoint().DebugString(), ": ", complete.status().message()));
    }
    if (*complete) return absl::OkStatus();
    if (!may_block && !AwaitSocket(fd(), POLLIN, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("Redis at ", endpoint().DebugString(), " did not answer in time"));
    }
    DDP_RETURN_IF_ERROR(ReceiveBytes(may_block));
    may_block = false;
  }
}

// Reads the bytes that have come. With `may_block`, waits for them, for at most kBlockingReceive.
absl::Status RedisConnection::ReceiveBytes(bool may_block) {
  using Blocking = RedisSocket::Blocking;
  char buffer[RedisSocket::kReceiveBytes];
  DDP_ASSIGN_OR_RETURN(
      const size_t count,
      socket_.Receive(absl::MakeSpan(buffer), may_block ? Blocking::kMayBlock : Blocking::kNever,
                      endpoint()));
  return count == 0 ? absl::OkStatus() : wire_.Feed(buffer, count);
}

}  // namespace ddp::store
