#include "store/redis/sentinel.h"

#include <poll.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/host_addresses.h"
#include "base/status_macros.h"
#include "store/redis/redis_socket.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(1);  // of one sentinel

absl::StatusOr<std::vector<std::string>> AddressesWithPort(const std::string& host, int port) {
  DDP_ASSIGN_OR_RETURN(std::vector<std::string> addresses, NumericAddressesOf(host));
  for (std::string& address : addresses) {
    const bool is_v6 = absl::StrContains(address, ':');
    address = is_v6 ? absl::StrCat("[", address, "]:", port) : absl::StrCat(address, ":", port);
  }
  return addresses;
}

// One conversation with the sentinel at a numeric address.
class Sentinel {
 public:
  explicit Sentinel(RedisEndpoint at) : at_(std::move(at)), deadline_(clock_.Now() + kTimeout) {}

  absl::Status Connect() {
    DDP_ASSIGN_OR_RETURN(socket_, RedisSocket::BeginConnecting(at_));
    DDP_RETURN_IF_ERROR(Await(POLLOUT));
    return socket_.FinishConnecting(at_).status();
  }

  absl::StatusOr<RedisReply> Ask(const std::vector<std::string>& command) {
    const std::string bytes = RedisWireForm({command});
    // The buffer of a new socket takes these few bytes at once.
    DDP_RETURN_IF_ERROR(socket_.Send(bytes, at_).status());
    RedisReply reply;
    while (true) {
      DDP_ASSIGN_OR_RETURN(const bool complete, wire_.NextReply(reply));
      if (complete) return reply;
      DDP_RETURN_IF_ERROR(Await(POLLIN));
      char buffer[RedisSocket::kReceiveBytes];
      DDP_ASSIGN_OR_RETURN(const size_t count, socket_.Receive(absl::MakeSpan(buffer),
                                                               RedisSocket::Blocking::kNever, at_));
      DDP_RETURN_IF_ERROR(wire_.Feed(buffer, count));
    }
  }

 private:
  absl::Status Await(short events) const {
    if (AwaitSocket(socket_.fd(), events, deadline_)) return absl::OkStatus();
    return absl::UnavailableError("no answer");
  }

  const RedisEndpoint at_;
  const MonotonicClock clock_;
  const absl::Time deadline_;
  RedisSocket socket_;
  RedisWire wire_{RedisWire::Pushes::kAreReplies};
};

absl::StatusOr<RedisReply> Query(const RedisEndpoint& endpoint, const RedisEndpoint& at) {
  const std::vector<std::string> question = {"SENTINEL", "GET-MASTER-ADDR-BY-NAME",
                                             endpoint.master_name};
  Sentinel sentinel(at);
  DDP_RETURN_IF_ERROR(sentinel.Connect());
  DDP_ASSIGN_OR_RETURN(RedisReply reply, sentinel.Ask(question));
  if (!absl::StartsWith(reply.error_text(), "NOAUTH") || endpoint.password.empty()) return reply;
  std::vector<std::string> login = {"AUTH"};
  if (!endpoint.user.empty()) login.push_back(endpoint.user);
  login.push_back(endpoint.password);
  DDP_ASSIGN_OR_RETURN(RedisReply answer, sentinel.Ask(login));
  if (answer.IsError()) return answer;
  return sentinel.Ask(question);
}

absl::StatusOr<std::vector<std::string>> AskOne(const RedisEndpoint& endpoint,
                                                const std::string& host, int port) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> addresses, AddressesWithPort(host, port));
  DDP_ASSIGN_OR_RETURN(const RedisEndpoint at, ParseRedisEndpoint(addresses.front()));
  DDP_ASSIGN_OR_RETURN(RedisReply reply, Query(endpoint, at));
  if (reply.IsError()) return absl::UnavailableError(reply.error_text());
  if (reply.IsNil()) {
    return absl::UnavailableError(absl::StrCat("it knows no master '", endpoint.master_name, "'"));
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<RedisReply> parts, std::move(reply).AsArray());
  if (parts.size() != 2) return absl::UnavailableError("its answer makes no sense");
  DDP_ASSIGN_OR_RETURN(const std::string master, parts[0].AsString());
  DDP_ASSIGN_OR_RETURN(const std::string master_port, parts[1].AsString());
  int number = 0;
  if (!absl::SimpleAtoi(master_port, &number)) {
    return absl::UnavailableError("its answer makes no sense");
  }
  return AddressesWithPort(master, number);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> AskSentinels(const RedisEndpoint& endpoint) {
  absl::Status last;
  for (const auto& [host, port] : endpoint.sentinels) {
    absl::StatusOr<std::vector<std::string>> found = AskOne(endpoint, host, port);
    if (found.ok() && !found->empty()) return found;
    last = absl::UnavailableError(
        absl::StrCat("sentinel ", host, ":", port, ": ", std::string(found.status().message())));
  }
  return last;
}

}  // namespace ddp::store
