#include "store/redis/redis_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/event_loop.h"
#include "base/status_macros.h"
#include "store/redis/redis_errors.h"
#include "store/redis/redis_socket.h"

namespace ddp::store {
namespace {

constexpr size_t kReceiveBytes = 32 * 1024;
// recv() itself blocks for this long before poll() is used. This saves a system call.
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

absl::StatusOr<UniqueFd> RedisConnection::Dial(absl::Time deadline) {
  Disconnect();
  absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
  if (!loop.ok()) return absl::UnavailableError(loop.status().message());
  absl::StatusOr<UniqueFd> result = absl::UnavailableError("the event loop has ended");
  dialer_.Dial(loop->get(), deadline, [&](absl::StatusOr<UniqueFd> fd) {
    result = std::move(fd);
    (*loop)->Stop();
  });
  const absl::Status ran = (*loop)->Run();
  dialer_.Cancel();
  DDP_RETURN_IF_ERROR(ran);
  if (result.ok()) DDP_RETURN_IF_ERROR(LimitBlocking(result->get(), kBlockingReceive));
  return result;
}

UniqueFd RedisConnection::Release() {
  UniqueFd fd = std::move(fd_);
  Disconnect();
  return fd;
}

void RedisConnection::Disconnect() {
  fd_.reset();
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
    DDP_ASSIGN_OR_RETURN(fd_, Dial(deadline));
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
bool RedisConnection::StillOpen() const {
  char byte = 0;
  const absl::StatusOr<size_t> received =
      ReceiveSome(fd_.get(), absl::MakeSpan(&byte, 1), MSG_PEEK | MSG_DONTWAIT, endpoint());
  // Unrequested bytes (a message before closing) would be read as the next reply.
  return received.ok() && *received == 0;
}

absl::Status RedisConnection::Write(const std::string& bytes, absl::Time deadline, bool& sent) {
  absl::string_view left = bytes;
  while (!left.empty()) {
    DDP_ASSIGN_OR_RETURN(const size_t count, SendSome(fd_.get(), left, endpoint()));
    if (count > 0) {
      left.remove_prefix(count);
      sent = true;
    } else if (!AwaitSocket(fd_.get(), POLLOUT, deadline)) {
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
    if (!may_block && !AwaitSocket(fd_.get(), POLLIN, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("Redis at ", endpoint().DebugString(), " did not answer in time"));
    }
    DDP_RETURN_IF_ERROR(ReceiveBytes(may_block));
    may_block = false;
  }
}

// Reads the bytes that have come. With `may_block`, waits for them, for at most kBlockingReceive.
absl::Status RedisConnection::ReceiveBytes(bool may_block) {
  char buffer[kReceiveBytes];
  DDP_ASSIGN_OR_RETURN(const size_t count, ReceiveSome(fd_.get(), absl::MakeSpan(buffer),
                                                       may_block ? 0 : MSG_DONTWAIT, endpoint()));
  return count == 0 ? absl::OkStatus() : wire_.Feed(buffer, count);
}

}  // namespace ddp::store
