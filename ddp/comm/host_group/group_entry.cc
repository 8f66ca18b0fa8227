#include "ddp/comm/host_group/group_entry.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/process/numa_node.h"
#include "base/status_macros.h"
#include "base/text_fields.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/futex.h"

namespace ddp::internal {
namespace {

constexpr char kDoor[] = "door";      // where the segment is, or why there is none
constexpr char kFailed[] = "failed";  // the reason of a member that has no place in the segment

// All members have come at this point, so an answer takes milliseconds unless a process is stopped.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(30);
// A waiting member looks this often whether another one has died.
constexpr absl::Duration kLookForDeath = absl::Milliseconds(20);
// Member 0 looks this often whether a member has failed before it had a place.
constexpr absl::Duration kLookForFailure = absl::Milliseconds(100);

std::string DoorAt(const ProcessFile& file) {
  return absl::StrCat("at ", file.pid_space, " ", file.inode, " ", file.pid, " ", file.fd);
}
std::string DoorOf(const absl::Status& reason) { return absl::StrCat("no ", reason.message()); }

// "at <where the segment is>", or "no <reason>"
absl::StatusOr<ProcessFile> ParseDoor(const std::string& door) {
  std::string word, reason;
  if (ReadFields(door, ' ', word, reason) && word == "no") return absl::UnavailableError(reason);
  ProcessFile file;
  if (ReadFields(door, ' ', word, file.pid_space, file.inode, file.pid, file.fd) && word == "at") {
    return file;
  }
  return absl::DataLossError("rank 0 of the host has another version of this library");
}

class Entry {
 public:
  Entry(GroupStore& store, const GroupEntry::Place& place)
      : store_(store), place_(place), deadline_(MonotonicClock().Now() + place.timeout) {}

  absl::StatusOr<GroupEntry::Result> Lead();
  absl::StatusOr<GroupEntry::Result> Follow();

 private:
  MemberRow& row(int member) const { return result_.segment->row(member); }
  absl::StatusOr<Segment> OpenSegment();
  absl::Status Enter(Segment segment);
  absl::Status MapArenas();
  absl::Status AwaitAll(EntryStep step, absl::Time deadline);
  absl::Status FindObstacle(const std::vector<int>& missing, absl::Time deadline);
  absl::Status Decide(const absl::Status& status);

  GroupStore& store_;
  const GroupEntry::Place place_;
  const absl::Time deadline_;
  absl::Time look_ = absl::InfinitePast();  // for a failure in the store
  GroupEntry::Result result_{.member = place_.member, .segment = {}, .arenas = {}, .thread = {}};
};

// Ends the entry for all members. The first verdict stays. Returns the one that holds.
absl::Status Entry::Decide(const absl::Status& status) {
  std::atomic<uint32_t>& verdict = result_.segment->header().verdict;
  auto mine = static_cast<uint32_t>(EntryVerdict::kEntered);
  if (!status.ok()) {
    EntryRow& refusal = row(place_.member).entry;
    refusal.refusal = static_cast<uint8_t>(status.code());
    status.message().copy(refusal.reason, sizeof refusal.reason - 1);
    mine = static_cast<uint32_t>(EntryVerdict::kRefused) | static_cast<uint32_t>(place_.member)
                                                               << 8;
  }
  uint32_t none = 0;
  verdict.compare_exchange_strong(none, mine, std::memory_order_seq_cst);
  result_.segment->RingAll();
  const uint32_t holds = verdict.load(std::memory_order_seq_cst);
  if ((holds & 0xff) == static_cast<uint32_t>(EntryVerdict::kEntered)) return absl::OkStatus();
  const EntryRow& refusal = row(static_cast<int>(holds >> 8) % place_.size).entry;
  const size_t length = ::strnlen(refusal.reason, sizeof refusal.reason);
  return {static_cast<absl::StatusCode>(refusal.refusal), {refusal.reason, length}};
}

// Returns the reason for which the `missing` members need not be waited for; OK: there is none yet.
absl::Status Entry::FindObstacle(const std::vector<int>& missing, absl::Time deadline) {
  for (int member = 0; member < place_.size; ++member) {
    const bool left = row(member).state.load(std::memory_order_acquire) ==
                      static_cast<uint32_t>(MemberState::kLeft);
    if (left || result_.segment->has_died(member)) {
      return absl::UnavailableError(absl::StrCat("rank ", member, " of the host has ended"));
    }
  }
  const absl::Time now = MonotonicClock().Now();
  if (now >= deadline) {
    const bool one = missing.size() == 1;
    return absl::DeadlineExceededError(absl::StrCat(one ? "rank " : "ranks ",
                                                    absl::StrJoin(missing, ", "), " of the host ",
                                                    one ? "has" : "have", " not come in time"));
  }
  if (place_.member != 0 || now < look_) return absl::OkStatus();
  look_ = now + kLookForFailure;
  return store_.Has({kFailed}) ? absl::UnavailableError(store_.Get(kFailed)) : absl::OkStatus();
}

// Takes `step`, and blocks until all members have, or one of them has ended the entry.
absl::Status Entry::AwaitAll(EntryStep step, absl::Time deadline) {
  MemberRow& own = row(place_.member);
  own.entry.step.store(static_cast<uint32_t>(step), std::memory_order_seq_cst);
  result_.segment->RingAll();
  while (true) {
    const uint32_t bell = own.bell.load(std::memory_order_seq_cst);
    if (result_.segment->header().verdict.load(std::memory_order_seq_cst) != 0) return Decide({});
    std::vector<int> missing;
    for (int member = 0; member < place_.size; ++member) {
      if (row(member).entry.step.load(std::memory_order_acquire) < static_cast<uint32_t>(step)) {
        missing.push_back(member);
      }
    }
    if (missing.empty()) return absl::OkStatus();
    const absl::Status obstacle = FindObstacle(missing, deadline);
    if (!obstacle.ok()) return Decide(obstacle);
    const absl::Duration left = deadline - MonotonicClock().Now();
    FutexWait(own.bell, bell, std::min(kLookForDeath, left));
  }
}

absl::Status Entry::MapArenas() {
  for (int member = 0; member < place_.size; ++member) {
    const EntryRow& peer = row(member).entry;
    absl::StatusOr<UniqueFd> file = peer.arena.Open();
    DDP_RETURN_IF_ERROR(file.status());
    DDP_ASSIGN_OR_RETURN(auto arena, PeerArena::Map(*std::move(file), peer.arena_bytes));
    result_.arenas.push_back(std::move(arena));
  }
  return absl::OkStatus();
}

// Takes this member's place, and meets the others there.
absl::Status Entry::Enter(Segment segment) {
  result_.segment = std::make_shared<const Segment>(std::move(segment));
  DDP_ASSIGN_OR_RETURN(result_.thread, MemberThread::Start(result_.segment, place_.member));
  result_.segment->Prefault(place_.member);
  MemberRow& own = row(place_.member);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    for (size_t core = 0; core < kMaxCores; ++core) {
      if (CPU_ISSET(core, &allowed)) own.cores[core / 64] |= uint64_t{1} << (core % 64);
    }
    own.numa_node = NumaNodeOf(allowed);
  }
  const auto of_this_rank = [&](const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat("rank ", place_.member, " of the host: ", status.message()));
  };
  const Arena& arena = Arena::OfProcess(place_.size);
  if (!arena.status().ok()) return Decide(of_this_rank(arena.status()));
  own.entry.arena = ProcessFile::Of(arena.fd());
  own.entry.arena_bytes = arena.reservation();
  DDP_RETURN_IF_ERROR(AwaitAll(EntryStep::kCame, deadline_));
  if (const absl::Status mapped = MapArenas(); !mapped.ok()) return Decide(of_this_rank(mapped));
  DDP_RETURN_IF_ERROR(AwaitAll(EntryStep::kMapped, MonotonicClock().Now() + kAnswerTimeout));
  return Decide({});
}

absl::StatusOr<GroupEntry::Result> Entry::Lead() {
  auto segment = Segment::Make(place_.size);
  absl::Status status = segment.status();
  if (status.ok()) {
    store_.Set(kDoor, DoorAt(ProcessFile::Of(segment->fd())));
    status = Enter(*std::move(segment));
  }
  if (status.ok()) return std::move(result_);
  store_.Set(kDoor, DoorOf(status));  // for members that come later
  return status;
}

absl::StatusOr<Segment> Entry::OpenSegment() {
  if (!store_.Wait(kDoor, place_.timeout)) {
    return absl::DeadlineExceededError("rank 0 of the host has not come in time");
  }
  DDP_ASSIGN_OR_RETURN(const ProcessFile file, ParseDoor(store_.Get(kDoor)));
  absl::StatusOr<UniqueFd> fd = file.Open();
  if (fd.ok()) return Segment::Map(*std::move(fd), place_.size);
  // Member 0 may have failed meanwhile, and says why.
  DDP_RETURN_IF_ERROR(ParseDoor(store_.Get(kDoor)).status());
  return fd.status();
}

absl::StatusOr<GroupEntry::Result> Entry::Follow() {
  absl::StatusOr<Segment> segment = OpenSegment();
  const absl::Status status = segment.ok() ? Enter(*std::move(segment)) : segment.status();
  if (status.ok()) return std::move(result_);
  // A member without a place tells member 0 through the store.
  if (result_.thread == nullptr) {
    store_.Set(kFailed, absl::StrCat("rank ", place_.member, " of the host: ", status.message()));
  }
  return status;
}

}  // namespace

absl::StatusOr<GroupEntry::Result> GroupEntry::Run(GroupStore& store, const Place& place) {
  if (place.member < 0 || place.member >= place.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no rank ", place.member, " of the host among ", place.size));
  }
  Entry entry(store, place);
  return place.member == 0 ? entry.Lead() : entry.Follow();
}

std::vector<std::string> GroupEntry::Keys() { return {kDoor, kFailed}; }

}  // namespace ddp::internal
