#ifndef DDP_COMM_SHARED_MEMORY_MAILBOXES_H_
#define DDP_COMM_SHARED_MEMORY_MAILBOXES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "ddp/comm/host_group/host_group.h"

namespace ddp::internal {

// The messages of one member of a HostGroup: one ring of bytes for each ordered pair of members.
//
// A receive takes the oldest message of its tag from its member. A message of another tag that
// comes first is kept until a receive asks for it. A send is complete when all bytes are in the
// ring: a small one at once, a larger one while the receiver takes it. A receive of another size
// than was sent fails with kInvalidArgument, on the receiver alone.
//
// Thread-compatible; an engine guards it. `done` functions are not called: Advance() hands them
// out.
class Mailboxes {
 public:
  using Done = absl::AnyInvocable<void(const absl::Status& status)>;
  using Finished = absl::InlinedVector<std::pair<Done, absl::Status>, 1>;

  // `group` outlives this.
  explicit Mailboxes(HostGroup* group);

  void Send(int to, uint64_t tag, std::span<const std::byte> data, int64_t deadline_ns, Done done);
  void Receive(int from, uint64_t tag, std::span<std::byte> data, int64_t deadline_ns, Done done);

  // Moves as many bytes as is possible without waiting, and notifies the members at the other ends.
  // Adds the functions of complete messages. Returns true when something has moved.
  bool Advance(Finished& finished);

  // Fails the messages for which a member that has left would be needed, and those that are late at
  // `now_ns`. Returns true when one was late.
  bool FailHopeless(int64_t now_ns, Finished& finished);

  void FailAll(const absl::Status& status, Finished& finished);

  bool empty() const { return sends_ == 0 && receives_ == 0; }
  int64_t earliest_deadline_ns() const;

 private:
  struct Frame {
    uint64_t tag = 0;
    uint64_t bytes = 0;
  };
  struct OutMessage {
    Frame frame;
    std::span<const std::byte> data;
    size_t sent = 0;  // of the frame and the data
    int64_t deadline_ns = 0;
    Done done;
  };
  struct InMessage {
    uint64_t tag = 0;
    std::span<std::byte> data;
    int64_t deadline_ns = 0;
    Done done;
  };
  struct Kept {
    uint64_t tag = 0;
    std::vector<std::byte> data;
  };
  // The messages from one member.
  struct Inbox {
    std::list<InMessage> receives;  // in the order of the calls
    std::list<Kept> kept;           // complete, and of a tag for which no receive has asked

    // The message that comes in now.
    bool begun = false;
    Frame frame;
    size_t received = 0;
    std::list<InMessage> taker;   // its receive, when that has the right size
    std::vector<std::byte> data;  // of a message without a taker: it is kept
  };

  void AdvanceSends(int to, Finished& finished);
  void AdvanceReceives(int from, Finished& finished);
  bool BeginArrival(int from);
  void TakeKept(int from, Finished& finished);
  bool HasNoMoreFrom(int member) const;

  HostGroup* const group_;
  std::vector<std::deque<OutMessage>> outgoing_;  // by member
  std::vector<Inbox> inboxes_;                    // by member
  size_t sends_ = 0;
  size_t receives_ = 0;
  bool moved_ = false;  // from or to the member that Advance() looks at
};

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_MAILBOXES_H_
