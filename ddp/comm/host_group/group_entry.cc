#include "ddp/comm/host_group/group_entry.h"

#include <sched.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/process/numa_node.h"
#include "base/status_macros.h"
#include "base/text_fields.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/arena/peer_arena.h"
#include "ddp/comm/host_group/process_file.h"
#include "ddp/comm/meeting/store_meeting.h"

namespace ddp::internal {
namespace {

// The names of the two meetings.
constexpr char kMemory[] = "memory";
constexpr char kMapped[] = "mapped";

// All ranks have come at the second meeting, so it takes milliseconds unless a process is stopped.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(30);
// A waiting member looks this often whether another one of its host has died.
constexpr absl::Duration kLookForDeath = absl::Milliseconds(50);

// Where a rank's memory is.
struct MemoryOfRank {
  ProcessFile segment;  // of member 0
  ProcessFile arena;
  uint64_t arena_bytes = 0;  // how much there is to map
};

std::string TextOf(const MemoryOfRank& memory) {
  const ProcessFile& segment = memory.segment;
  const ProcessFile& arena = memory.arena;
  return absl::StrJoin({segment.pid_space, segment.inode, static_cast<uint64_t>(segment.pid),
                        static_cast<uint64_t>(segment.fd), arena.inode,
                        static_cast<uint64_t>(arena.fd), memory.arena_bytes},
                       " ");
}

absl::StatusOr<MemoryOfRank> ParseMemory(const std::string& text) {
  MemoryOfRank memory;
  ProcessFile& segment = memory.segment;
  ProcessFile& arena = memory.arena;
  if (!ReadFields(text, ' ', segment.pid_space, segment.inode, segment.pid, segment.fd, arena.inode,
                  arena.fd, memory.arena_bytes)) {
    return absl::DataLossError("another rank has another version of this library");
  }
  arena.pid_space = segment.pid_space;
  arena.pid = segment.pid;
  return memory;
}

class Entry {
 public:
  Entry(GroupStore& store, const GroupEntry::Place& place)
      : store_(std::shared_ptr<GroupStore>(), &store),
        place_(place),
        membership_{.rank = place.first_rank + place.member,
                    .size = std::max(place.ranks, place.size)} {}

  absl::StatusOr<std::shared_ptr<HostGroup>> Run();

 private:
  absl::Status Make(MemoryOfRank& memory);
  absl::Status Map(const std::vector<std::string>& texts);
  void SayWhereThisMemberRuns() const;
  absl::Status AwaitAll(StoreMeeting& mapped);
  absl::Status Refuse(StoreMeeting& meeting, const absl::Status& reason);

  const std::shared_ptr<GroupStore> store_;
  const GroupEntry::Place place_;
  const Membership membership_;
  std::shared_ptr<const Segment> segment_;
  std::shared_ptr<HostGroup> group_;
};

absl::StatusOr<std::shared_ptr<HostGroup>> Entry::Run() {
  StoreMeeting first(store_, kMemory, membership_);
  MemoryOfRank memory;
  if (const absl::Status made = Make(memory); !made.ok()) return Refuse(first, made);
  const MeetingEnd end = AttendMeeting(first, TextOf(memory), place_.timeout);
  if (!end.missing.empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat(end.missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(end.missing, ", "),
                     end.missing.size() == 1 ? " has" : " have", " not come in time"));
  }
  if (end.verdict != StoreMeeting::kMet) return absl::UnavailableError(end.verdict);
  StoreMeeting mapped(store_, kMapped, membership_);
  if (const absl::Status status = Map(first.Values()); !status.ok()) return Refuse(mapped, status);
  DDP_RETURN_IF_ERROR(AwaitAll(mapped));
  group_->Begin();
  return std::move(group_);
}

// Ends a meeting for all ranks, because this one cannot go on. The first reason stays.
absl::Status Entry::Refuse(StoreMeeting& meeting, const absl::Status& reason) {
  return absl::UnavailableError(
      meeting.Decide(absl::StrCat("rank ", membership_.rank, ": ", reason.message())));
}

absl::Status Entry::Make(MemoryOfRank& memory) {
  const Arena& arena = Arena::OfProcess(place_.size);
  DDP_RETURN_IF_ERROR(arena.status());
  memory.arena = ProcessFile::Of(arena.fd());
  memory.arena_bytes = arena.reservation();
  memory.segment = memory.arena;
  if (place_.member != 0) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(segment_, Segment::Make(place_.size));
  memory.segment = ProcessFile::Of(segment_->fd());
  return absl::OkStatus();
}

// Maps the memory of the members of this host, and takes this member's place. `texts`: by rank.
absl::Status Entry::Map(const std::vector<std::string>& texts) {
  std::vector<std::shared_ptr<const PeerArena>> arenas;
  for (int member = 0; member < place_.size; ++member) {
    DDP_ASSIGN_OR_RETURN(const MemoryOfRank memory, ParseMemory(texts[place_.first_rank + member]));
    if (member == 0 && place_.member != 0) {
      DDP_ASSIGN_OR_RETURN(UniqueFd file, memory.segment.Open());
      DDP_ASSIGN_OR_RETURN(segment_, Segment::Map(std::move(file), place_.size));
    }
    DDP_ASSIGN_OR_RETURN(UniqueFd file, memory.arena.Open());
    DDP_ASSIGN_OR_RETURN(auto arena, PeerArena::Map(std::move(file), memory.arena_bytes));
    arenas.push_back(std::move(arena));
  }
  DDP_ASSIGN_OR_RETURN(group_, HostGroup::Make(place_.member, segment_, std::move(arenas)));
  segment_->Prefault(place_.member);
  SayWhereThisMemberRuns();
  return absl::OkStatus();
}

void Entry::SayWhereThisMemberRuns() const {
  MemberRow& own = segment_->row(place_.member);
  CPU_ZERO(&own.cores);
  if (::sched_getaffinity(0, sizeof own.cores, &own.cores) != 0) return;
  own.numa_node = NumaNodeOf(own.cores);
}

// Blocks until all ranks have mapped their memory, or one of them has ended the meeting.
absl::Status Entry::AwaitAll(StoreMeeting& mapped) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + std::min(kAnswerTimeout, place_.timeout);
  mapped.Arrive("");
  std::optional<std::string> verdict;
  while (!(verdict = mapped.AwaitVerdict(kLookForDeath)).has_value()) {
    std::string obstacle;
    if (clock.Now() >= deadline) obstacle = "a rank has not mapped the memory of its host in time";
    for (int member = 0; member < place_.size; ++member) {
      if (!segment_->has_died(member)) continue;
      obstacle = absl::StrCat("rank ", place_.first_rank + member, " has ended");
    }
    if (!obstacle.empty()) (void)mapped.Decide(obstacle);
  }
  return *verdict == StoreMeeting::kMet ? absl::OkStatus() : absl::UnavailableError(*verdict);
}

}  // namespace

absl::StatusOr<std::shared_ptr<HostGroup>> GroupEntry::Run(GroupStore& store, const Place& place) {
  if (place.member < 0 || place.member >= place.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no rank ", place.member, " of the host among ", place.size));
  }
  return Entry(store, place).Run();
}

std::vector<std::string> GroupEntry::Keys(int ranks) {
  std::vector<std::string> keys = StoreMeeting::Keys(kMemory, ranks);
  for (std::string& key : StoreMeeting::Keys(kMapped, ranks)) keys.push_back(std::move(key));
  return keys;
}

}  // namespace ddp::internal
