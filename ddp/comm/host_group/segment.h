#ifndef DDP_COMM_HOST_GROUP_SEGMENT_H_
#define DDP_COMM_HOST_GROUP_SEGMENT_H_

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::internal {

// The memory that the members of a HostGroup share: one table row for each member, two staging
// buffers for each member, and one mailbox for each ordered pair of members. A memfd without a
// name, so only a process that holds its descriptor can reach it.
//
//   offset                 contents
//   0                      SegmentHeader
//   4096                   size x MemberRow
//   staging                size x 2 x kStagingBytes
//   mailboxes              size x size x kMailboxBytes
//
// Pages of the mailboxes get memory with their first message.

inline constexpr int kMaxMembers = 256;
inline constexpr size_t kStagingBytes = size_t{256} << 10;  // one half
inline constexpr size_t kMailboxBytes = size_t{64} << 10;   // with its MailboxHeader

// The end of a group, as one word: 0 while the group lives. The first end is final.
enum class GroupEnd : uint32_t {
  kNone = 0,
  kDied = 1,     // a member's process, or its thread of the group, has ended
  kAborted = 2,  // a member has called HostGroup::Abort()
};

struct SegmentHeader {
  uint64_t magic = 0;
  uint32_t size = 0;
  std::atomic<uint32_t> end;  // GroupEnd in the low byte, the member above it
  // The signals without a header that all members together have given. See CollectiveEngine.
  alignas(64) std::atomic<uint64_t> arrivals;
};

// Where all data of a member are at the start of a collective.
enum class RoundData : uint8_t {
  kElsewhere = 0,       // in its arena, or not shared yet
  kInStaging = 1,       // in its staging buffer
  kInAnnouncement = 2,  // beside the header
};

// What the members of a collective must have in common: see KeyOf(). Has no padding.
struct CollectiveKey {
  uint64_t elements = 0;
  int32_t root = -1;
  uint32_t tag = 0;
  uint16_t kind = 0;
  uint16_t reduction = 0;
  uint16_t type = 0;
  uint16_t tagged = 0;  // 1: the caller has set the tag
  friend bool operator==(const CollectiveKey&, const CollectiveKey&) = default;
};

// The start of a collective, as one member describes it.
struct RoundHeader {
  CollectiveKey key;
  RoundData data = RoundData::kElsewhere;
  uint32_t rounds = 0;  // of data, that this member needs
  // 1 + the offset of the member's tensor in its arena; 0: elsewhere. Where the sizes may differ:
  // the bytes that this member gives.
  uint64_t registered_or_bytes = 0;
};

// A header, with the number of the signal by which the member has announced it, and with the data
// when they are few. So a small collective reads one cache line of each member.
struct alignas(64) Announcement {
  static constexpr size_t kDataBytes = 16;

  RoundHeader header;
  std::atomic<uint64_t> signal;
  std::byte data[kDataBytes];
};
static_assert(sizeof(Announcement) == 64);

// One member's part of the table. Each group of fields has a cache line of its own. A member
// writes its own row only, except for `bell`.
struct MemberRow {
  // Locked by the member's thread as long as the member lives: the kernel marks the word when that
  // thread ends. See HostGroup.
  alignas(64) pthread_mutex_t life;
  alignas(64) std::atomic<uint32_t> state;  // MemberState
  cpu_set_t cores;                          // on which the member may run
  int32_t numa_node = -1;                   // of these cores; -1: they have several
  // The number of signals that this member has given. See CollectiveEngine.
  alignas(64) std::atomic<uint64_t> signals;
  // Rung, and woken, by a member that changes what sleeping threads of this member may wait for.
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;  // threads of this member that sleep, or are about to
  // Not 0 while this member writes into memory of other members.
  alignas(64) std::atomic<uint32_t> touching;
  Announcement announcements[2];
};

enum class MemberState : uint32_t { kAbsent = 0, kJoined = 1, kLeft = 2 };

// A ring of bytes from one member to another. The counters never go back.
struct MailboxHeader {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

// One process's mapping of the segment. Thread-safe: all methods are constant.
class Segment {
 public:
  using Pointer = std::shared_ptr<const Segment>;

  // Makes the segment of a group of `size` members, with no member in it.
  static absl::StatusOr<Pointer> Make(int size);

  // Maps a segment that another process has made. An error when the descriptor is not that of a
  // segment for `size` members.
  static absl::StatusOr<Pointer> Map(UniqueFd fd, int size);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  int fd() const { return fd_.get(); }
  int size() const { return size_; }
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  MemberRow& row(int member) const { return rows()[member]; }
  std::byte* staging(int member, int half) const {
    return base_ + staging_ + (static_cast<size_t>(member) * 2 + half) * kStagingBytes;
  }
  MailboxHeader& mailbox(int from, int to) const {
    return *reinterpret_cast<MailboxHeader*>(
        base_ + mailboxes_ + (static_cast<size_t>(from) * size_ + to) * kMailboxBytes);
  }
  static constexpr size_t kMailboxCapacity = kMailboxBytes - sizeof(MailboxHeader);
  static std::byte* Data(MailboxHeader& mailbox) {
    return reinterpret_cast<std::byte*>(&mailbox + 1);
  }

  // The word by which the kernel marks the end of a member that has not left.
  static std::atomic<uint32_t>& LifeWord(MemberRow& row);
  bool has_died(int member) const;
  bool has_left(int member) const {
    return row(member).state.load(std::memory_order_acquire) ==
           static_cast<uint32_t>(MemberState::kLeft);
  }

  // Rings and wakes all members, whatever they wait for.
  void RingAll() const;

  // Gives the member's rows and staging buffers memory, from the thread that will use them.
  void Prefault(int member) const;

 private:
  Segment(UniqueFd fd, int size);
  absl::Status MapAll();
  MemberRow* rows() const { return reinterpret_cast<MemberRow*>(base_ + 4096); }

  const UniqueFd fd_;
  const int size_;
  const size_t staging_;    // offset of the first staging buffer
  const size_t mailboxes_;  // of the first mailbox
  const size_t bytes_;
  std::byte* base_ = nullptr;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_SEGMENT_H_
