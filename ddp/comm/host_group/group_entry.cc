#include "ddp/comm/host_group/group_entry.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/descriptor_socket.h"

namespace ddp::internal {
namespace {

constexpr char kDoor[] = "door";
constexpr char kFailed[] = "failed";  // the reason of a member that cannot enter
constexpr size_t kTokenBytes = 16;
using Token = std::array<char, kTokenBytes>;

// Between processes of different builds: change the number with every change of a struct here, of
// the Segment, or of a protocol in it.
constexpr uint32_t kVersion = 2;

struct Hello {
  uint32_t version = kVersion;
  int32_t member = 0;
  Token token = {};
  uint64_t arena_bytes = 0;
};

// One step of the exchange: `code` is not 0 when the sender has failed, for the reason `text`.
struct Step {
  uint8_t code = 0;
  char text[255] = {};
};

Step StepOf(const absl::Status& status) {
  Step step{.code = static_cast<uint8_t>(status.code())};
  const std::string text(status.message());
  std::memcpy(step.text, text.data(), std::min(text.size(), sizeof step.text - 1));
  return step;
}

absl::Status StatusOf(Step step) {
  step.text[sizeof step.text - 1] = '\0';
  return absl::Status(static_cast<absl::StatusCode>(step.code), step.text);
}

template <typename Value>
std::span<const std::byte> BytesOf(const Value& value) {
  return std::as_bytes(std::span<const Value>(&value, 1));
}
template <typename Value>
std::span<std::byte> WritableBytesOf(Value& value) {
  return std::as_writable_bytes(std::span<Value>(&value, 1));
}

// All members are connected at this point, so an answer takes microseconds unless a process is
// stopped.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(30);
// Between the ends of two members' times, which began together.
constexpr absl::Duration kGrace = absl::Seconds(5);
// Member 0 looks this often whether a member has failed before it was connected.
constexpr absl::Duration kLookForFailure = absl::Milliseconds(100);
// Connections from which no Hello has come. When there are more, the oldest is a stranger's.
constexpr size_t kMaxSilent = 2 * kMaxMembers;

class Entry {
 public:
  Entry(GroupStore& store, const GroupEntry::Place& place)
      : store_(store), place_(place), deadline_(MonotonicClock().Now() + place.timeout) {}

  absl::StatusOr<GroupEntry::Result> Lead();
  absl::StatusOr<GroupEntry::Result> Follow();

 private:
  absl::Duration Left() const { return deadline_ - MonotonicClock().Now(); }
  absl::Status AwaitMembers(int listener, const Token& token);
  absl::Status AwaitEvents(int listener, absl::Duration timeout, const Token& token);
  absl::Status AcceptAll(int listener);
  absl::Status Greet(UniqueFd socket, const Token& token);
  std::string Missing() const;
  absl::StatusOr<GroupEntry::Result> Assemble(Segment segment);
  absl::Status SendMemory(const Segment& segment);
  absl::Status Conclude(absl::Status status);
  absl::StatusOr<UniqueFd> Enter(const std::string& door) const;
  absl::StatusOr<GroupEntry::Result> ReceiveMemory(int socket);
  absl::StatusOr<GroupEntry::Result> Join();

  GroupStore& store_;
  const GroupEntry::Place place_;
  const absl::Time deadline_;
  // Of member 0.
  std::vector<UniqueFd> silent_;   // nothing has come from them
  std::vector<UniqueFd> sockets_;  // this and the next two: by member
  std::vector<UniqueFd> arenas_;
  std::vector<uint64_t> arena_bytes_;
  // Of any other member: member 0 waits for it no longer.
  bool member_0_knows_ = false;
};

// Returns "rank 2 of the host has" or "ranks 1, 2 of the host have".
std::string Entry::Missing() const {
  std::vector<int> missing;
  for (int member = 1; member < place_.size; ++member) {
    if (!sockets_[member].valid()) missing.push_back(member);
  }
  const bool one = missing.size() == 1;
  return absl::StrCat(one ? "rank " : "ranks ", absl::StrJoin(missing, ", "), " of the host ",
                      one ? "has" : "have");
}

// Blocks until every member has connected and said who it is, or a member has failed.
absl::Status Entry::AwaitMembers(int listener, const Token& token) {
  absl::Time look = MonotonicClock().Now() + kLookForFailure;
  while (std::any_of(sockets_.begin() + 1, sockets_.end(),
                     [](const UniqueFd& socket) { return !socket.valid(); })) {
    const absl::Time now = MonotonicClock().Now();
    if (now >= deadline_) {
      return absl::DeadlineExceededError(absl::StrCat(Missing(), " not come in time"));
    }
    if (now >= look) {
      if (store_.Has({kFailed})) return absl::UnavailableError(store_.Get(kFailed));
      look = now + kLookForFailure;
    }
    DDP_RETURN_IF_ERROR(AcceptAll(listener));
    DDP_RETURN_IF_ERROR(AwaitEvents(listener, std::min(deadline_, look) - now, token));
  }
  silent_.clear();
  return absl::OkStatus();
}

// Blocks until a connection comes, or something on one of them, or `timeout`. Greets those on which
// something has come.
absl::Status Entry::AwaitEvents(int listener, absl::Duration timeout, const Token& token) {
  std::vector<pollfd> polled = {{.fd = listener, .events = POLLIN, .revents = 0}};
  for (const UniqueFd& socket : sockets_) {  // poll() takes no notice of -1
    polled.push_back({.fd = socket.get(), .events = POLLRDHUP, .revents = 0});
  }
  for (const UniqueFd& socket : silent_) {
    polled.push_back({.fd = socket.get(), .events = POLLIN, .revents = 0});
  }
  const int64_t wait_ms = absl::ToInt64Milliseconds(timeout) + 1;
  const int ready = ::poll(polled.data(), polled.size(), static_cast<int>(wait_ms));
  if (ready < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll");
  if (ready <= 0) return absl::OkStatus();
  for (int member = 1; member < place_.size; ++member) {
    if (polled[1 + member].revents == 0) continue;
    return absl::UnavailableError(
        absl::StrCat("rank ", member, " of the host has closed its connection, or has ended"));
  }
  absl::Status status;
  std::vector<UniqueFd> silent = std::exchange(silent_, {});
  for (size_t i = 0; i < silent.size(); ++i) {
    if (polled[1 + sockets_.size() + i].revents == 0 || !status.ok()) {
      silent_.push_back(std::move(silent[i]));
    } else {
      status = Greet(std::move(silent[i]), token);
    }
  }
  return status;
}

// Takes the connections that wait. That of another user is closed.
absl::Status Entry::AcceptAll(int listener) {
  for (int i = 0; i < kMaxMembers; ++i) {
    absl::StatusOr<UniqueFd> socket = Accept(listener, absl::ZeroDuration());
    if (absl::IsDeadlineExceeded(socket.status())) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(socket.status());
    if (!CheckSameUser(socket->get()).ok()) continue;
    if (silent_.size() == kMaxSilent) silent_.erase(silent_.begin());
    silent_.push_back(*std::move(socket));
  }
  return absl::OkStatus();
}

// Reads the Hello, which a member sends at once and in one piece. A stranger's connection is
// closed. An error: the group cannot come together.
absl::Status Entry::Greet(UniqueFd socket, const Token& token) {
  Hello hello;
  auto descriptors = ReceiveAll(socket.get(), WritableBytesOf(hello), 1, absl::ZeroDuration());
  if (!descriptors.ok() || hello.token != token) return absl::OkStatus();
  absl::Status status;
  if (hello.version != kVersion) {
    status = absl::FailedPreconditionError(
        absl::StrCat("rank ", hello.member, " of the host has another version of this library"));
  } else if (hello.member < 1 || hello.member >= place_.size) {
    status = absl::FailedPreconditionError(
        absl::StrCat("a process is rank ", hello.member, " of the host, which has ", place_.size));
  } else if (sockets_[hello.member].valid()) {
    status = absl::FailedPreconditionError(
        absl::StrCat("two processes are rank ", hello.member, " of the host"));
  }
  if (!status.ok()) {
    (void)SendAll(socket.get(), BytesOf(StepOf(status)), {}, kAnswerTimeout);
    return status;
  }
  sockets_[hello.member] = std::move(socket);
  arenas_[hello.member] = std::move(descriptors->front());
  arena_bytes_[hello.member] = hello.arena_bytes;
  return absl::OkStatus();
}

absl::Status Entry::SendMemory(const Segment& segment) {
  std::vector<int> descriptors = {segment.fd()};
  for (const UniqueFd& arena : arenas_) descriptors.push_back(arena.get());
  for (int member = 1; member < place_.size; ++member) {
    const int socket = sockets_[member].get();
    DDP_RETURN_IF_ERROR(SendAll(socket, BytesOf(Step{}), {}, kAnswerTimeout));
    DDP_RETURN_IF_ERROR(
        SendAll(socket, std::as_bytes(std::span(arena_bytes_)), {}, kAnswerTimeout));
    for (size_t begin = 0; begin < descriptors.size(); begin += kMaxDescriptors) {
      const size_t count = std::min(kMaxDescriptors, descriptors.size() - begin);
      DDP_RETURN_IF_ERROR(SendAll(socket, BytesOf(Step{}),
                                  std::span<const int>(descriptors).subspan(begin, count),
                                  kAnswerTimeout));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<GroupEntry::Result> Entry::Assemble(Segment segment) {
  GroupEntry::Result result{.member = place_.member, .segment = std::move(segment), .arenas = {}};
  for (int member = 0; member < place_.size; ++member) {
    DDP_ASSIGN_OR_RETURN(auto arena,
                         PeerArena::OfProcess(std::move(arenas_[member]), arena_bytes_[member]));
    result.arenas.push_back(std::move(arena));
  }
  return result;
}

// Tells all connected members how it ends.
absl::Status Entry::Conclude(absl::Status status) {
  const Step step = StepOf(status);
  for (const UniqueFd& socket : sockets_) {
    if (!socket.valid()) continue;
    const absl::Status sent = SendAll(socket.get(), BytesOf(step), {}, kAnswerTimeout);
    if (status.ok()) status = sent;
  }
  return status;
}

absl::StatusOr<GroupEntry::Result> Entry::Lead() {
  struct {
    std::array<char, 16> name;
    Token token;
  } door;
  if (::getrandom(&door, sizeof door, 0) != sizeof door)
    return absl::ErrnoToStatus(errno, "random");
  const std::string name =
      absl::StrCat("ddp-", absl::BytesToHexString({door.name.data(), door.name.size()}));
  const std::string token = absl::BytesToHexString({door.token.data(), door.token.size()});
  auto listener = ListenAt(name, SOMAXCONN);
  auto segment = Segment::Make(place_.size);
  const Arena& arena = Arena::OfProcess(place_.size);
  UniqueFd arena_fd(::fcntl(arena.fd(), F_DUPFD_CLOEXEC, 0));
  absl::Status begun = arena.status();
  begun.Update(listener.status());
  begun.Update(segment.status());
  if (!arena_fd.valid()) begun.Update(absl::ErrnoToStatus(errno, "the arena's descriptor"));
  if (!begun.ok()) {
    store_.Set(kDoor, absl::StrCat("no ", begun.message()));
    return begun;
  }
  sockets_.resize(place_.size);
  arenas_.resize(place_.size);
  arena_bytes_.resize(place_.size);
  arenas_[0] = std::move(arena_fd);
  arena_bytes_[0] = arena.reservation();
  store_.Set(kDoor, absl::StrCat("at ", name, " ", token));
  absl::Status status = AwaitMembers(listener->get(), door.token);
  if (!status.ok()) {
    // Members that come later, and members whose Hello is unread, learn the reason too.
    store_.Set(kDoor, absl::StrCat("no ", status.message()));
    (void)AcceptAll(listener->get());
    std::move(silent_.begin(), silent_.end(), std::back_inserter(sockets_));
  }
  listener->reset();
  if (status.ok()) status = SendMemory(*segment);
  if (!status.ok()) return Conclude(status);
  auto result = Assemble(*std::move(segment));
  status = result.status();
  for (int member = 1; member < place_.size; ++member) {
    Step step;
    const auto answer =
        ReceiveAll(sockets_[member].get(), WritableBytesOf(step), 0, kAnswerTimeout);
    const absl::Status of_member = answer.ok() ? StatusOf(step) : answer.status();
    if (of_member.ok()) continue;
    status.Update(absl::Status(
        of_member.code(), absl::StrCat("rank ", member, " of the host: ", of_member.message())));
  }
  DDP_RETURN_IF_ERROR(Conclude(status));
  for (int member = 1; member < place_.size; ++member) {
    result->links.push_back({.member = member, .socket = std::move(sockets_[member])});
  }
  return result;
}

// Connects and says who this is.
absl::StatusOr<UniqueFd> Entry::Enter(const std::string& door) const {
  // "at <name> <token>", or "no <reason>"
  const size_t space = door.find(' ', 3);
  if (door.rfind("at ", 0) != 0 || space == std::string::npos) {
    return absl::UnavailableError(door.substr(std::min<size_t>(3, door.size())));
  }
  const std::string token = absl::HexStringToBytes(door.substr(space + 1));
  if (token.size() != kTokenBytes) return absl::DataLossError("the token is damaged");
  const Arena& arena = Arena::OfProcess(place_.size);
  DDP_RETURN_IF_ERROR(arena.status());
  DDP_ASSIGN_OR_RETURN(UniqueFd socket, ConnectTo(door.substr(3, space - 3), Left()));
  // The token and the arena, which the receiver may write, are for ranks of this user alone. The
  // kernel gives the user of the process that listens.
  DDP_RETURN_IF_ERROR(CheckSameUser(socket.get()));
  Hello hello{.member = place_.member, .arena_bytes = arena.reservation()};
  std::copy(token.begin(), token.end(), hello.token.begin());
  const int fd = arena.fd();
  DDP_RETURN_IF_ERROR(SendAll(socket.get(), BytesOf(hello), std::span(&fd, 1), kAnswerTimeout));
  return socket;
}

absl::StatusOr<GroupEntry::Result> Entry::ReceiveMemory(int socket) {
  Step step;
  // Member 0 answers when the last member has come, or says at its own deadline who has not.
  DDP_RETURN_IF_ERROR(ReceiveAll(socket, WritableBytesOf(step), 0, Left() + kGrace).status());
  member_0_knows_ = true;
  DDP_RETURN_IF_ERROR(StatusOf(step));
  arena_bytes_.resize(place_.size);
  DDP_RETURN_IF_ERROR(
      ReceiveAll(socket, std::as_writable_bytes(std::span(arena_bytes_)), 0, kAnswerTimeout)
          .status());
  std::vector<UniqueFd> descriptors;
  const size_t expected = static_cast<size_t>(place_.size) + 1;
  while (descriptors.size() < expected) {
    const size_t count = std::min(kMaxDescriptors, expected - descriptors.size());
    DDP_ASSIGN_OR_RETURN(std::vector<UniqueFd> some,
                         ReceiveAll(socket, WritableBytesOf(step), count, kAnswerTimeout));
    std::move(some.begin(), some.end(), std::back_inserter(descriptors));
  }
  std::move(descriptors.begin() + 1, descriptors.end(), std::back_inserter(arenas_));
  DDP_ASSIGN_OR_RETURN(Segment segment, Segment::Map(std::move(descriptors.front()), place_.size));
  return Assemble(std::move(segment));
}

absl::StatusOr<GroupEntry::Result> Entry::Join() {
  if (!store_.Wait(kDoor, Left())) {
    return absl::DeadlineExceededError("rank 0 of the host has not come in time");
  }
  DDP_ASSIGN_OR_RETURN(UniqueFd socket, Enter(store_.Get(kDoor)));
  absl::StatusOr<GroupEntry::Result> result = ReceiveMemory(socket.get());
  if (!member_0_knows_) return result;
  const absl::Status sent =
      SendAll(socket.get(), BytesOf(StepOf(result.status())), {}, kAnswerTimeout);
  DDP_RETURN_IF_ERROR(result.status());
  DDP_RETURN_IF_ERROR(sent);
  // Member 0 may wait for the answers of two others, one after the other.
  Step verdict;
  DDP_RETURN_IF_ERROR(
      ReceiveAll(socket.get(), WritableBytesOf(verdict), 0, 2 * kAnswerTimeout).status());
  DDP_RETURN_IF_ERROR(StatusOf(verdict));
  result->links.push_back({.member = 0, .socket = std::move(socket)});
  return result;
}

// A failure of which member 0 would not hear by the connection goes through the store, and the
// other way round.
absl::StatusOr<GroupEntry::Result> Entry::Follow() {
  absl::StatusOr<GroupEntry::Result> result = Join();
  if (result.ok() || member_0_knows_) return result;
  if (store_.Has({kDoor})) {
    const std::string door = store_.Get(kDoor);
    if (door.rfind("no ", 0) == 0) return absl::UnavailableError(door.substr(3));
  }
  store_.Set(kFailed,
             absl::StrCat("rank ", place_.member, " of the host: ", result.status().message()));
  return result;
}

}  // namespace

absl::StatusOr<GroupEntry::Result> GroupEntry::Run(GroupStore& store, const Place& place) {
  Entry entry(store, place);
  return place.member == 0 ? entry.Lead() : entry.Follow();
}

std::vector<std::string> GroupEntry::Keys() { return {kDoor, kFailed}; }

}  // namespace ddp::internal
