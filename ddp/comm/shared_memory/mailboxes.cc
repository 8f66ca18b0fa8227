#include "ddp/comm/shared_memory/mailboxes.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace ddp::internal {
namespace {

constexpr size_t kCapacity = Segment::kMailboxCapacity;

// Copies into or out of a ring, of which `position` bytes have gone by.
void PutInto(MailboxHeader& box, uint64_t position, const std::byte* from, size_t bytes) {
  const size_t at = position % kCapacity;
  const size_t first = std::min(bytes, kCapacity - at);
  std::memcpy(Segment::Data(box) + at, from, first);
  std::memcpy(Segment::Data(box), from + first, bytes - first);
}

void TakeFrom(MailboxHeader& box, uint64_t position, std::byte* to, size_t bytes) {
  const size_t at = position % kCapacity;
  const size_t first = std::min(bytes, kCapacity - at);
  std::memcpy(to, Segment::Data(box) + at, first);
  std::memcpy(to + first, Segment::Data(box), bytes - first);
}

}  // namespace

Mailboxes::Mailboxes(HostGroup* group)
    : group_(group), outgoing_(group->size()), arrivals_(group->size()), kept_(group->size()) {}

void Mailboxes::Send(int to, uint64_t tag, std::span<const std::byte> data, int64_t deadline_ns,
                     Done done) {
  outgoing_[to].push_back({.frame = {.tag = tag, .bytes = data.size()},
                           .data = data,
                           .deadline_ns = deadline_ns,
                           .done = std::move(done)});
  ++sends_;
}

void Mailboxes::Receive(int from, uint64_t tag, std::span<std::byte> data, int* source,
                        int64_t deadline_ns, Done done) {
  receives_.push_back({.from = from,
                       .tag = tag,
                       .data = data,
                       .source = source,
                       .deadline_ns = deadline_ns,
                       .done = std::move(done)});
}

bool Mailboxes::Advance(Finished& finished) {
  bool moved = false;
  for (int member = 0; member < group_->size() && !empty(); ++member) {
    moved_ = false;
    if (!outgoing_[member].empty()) AdvanceSends(member, finished);
    if (!receives_.empty()) AdvanceReceives(member, finished);
    if (moved_) group_->Notify(member);
    moved |= moved_;
  }
  return moved;
}

void Mailboxes::AdvanceSends(int to, Finished& finished) {
  MailboxHeader& box = group_->segment().mailbox(group_->member(), to);
  std::deque<OutMessage>& queue = outgoing_[to];
  while (!queue.empty()) {
    OutMessage& message = queue.front();
    const uint64_t written = box.written.load(std::memory_order_relaxed);
    const size_t room = kCapacity - (written - box.read.load(std::memory_order_acquire));
    const bool begun = message.sent >= sizeof(Frame);
    if (room < (begun ? 1 : sizeof(Frame))) return;
    uint64_t position = written;
    if (!begun) {
      PutInto(box, position, reinterpret_cast<const std::byte*>(&message.frame), sizeof(Frame));
      position += sizeof(Frame);
      message.sent = sizeof(Frame);
    }
    const size_t done = message.sent - sizeof(Frame);
    const size_t count = std::min(message.data.size() - done, room - (position - written));
    if (count > 0) PutInto(box, position, message.data.data() + done, count);
    message.sent += count;
    box.written.store(position + count, std::memory_order_release);
    moved_ = true;
    if (message.sent < sizeof(Frame) + message.data.size()) return;
    finished.emplace_back(std::move(message.done), absl::OkStatus());
    queue.pop_front();
    --sends_;
  }
}

std::list<Mailboxes::InMessage>::iterator Mailboxes::FindTaker(int from, uint64_t tag) {
  return std::find_if(receives_.begin(), receives_.end(), [&](const InMessage& message) {
    return (message.from == from || message.from < 0) && message.tag == tag;
  });
}

// Reads the frame of the next message, and finds the memory for it. False: nothing is to be read.
bool Mailboxes::BeginArrival(int from) {
  Arrival& arrival = arrivals_[from];
  MailboxHeader& box = group_->segment().mailbox(from, group_->member());
  const auto is_from = [&](const InMessage& message) {
    return message.from == from || message.from < 0;
  };
  if (std::none_of(receives_.begin(), receives_.end(), is_from)) return false;
  const uint64_t read = box.read.load(std::memory_order_relaxed);
  if (box.written.load(std::memory_order_acquire) - read < sizeof(Frame)) return false;
  TakeFrom(box, read, reinterpret_cast<std::byte*>(&arrival.frame), sizeof(Frame));
  box.read.store(read + sizeof(Frame), std::memory_order_release);
  moved_ = true;
  arrival.begun = true;
  arrival.received = 0;
  arrival.taker = FindTaker(from, arrival.frame.tag);
  const bool fits =
      arrival.taker != receives_.end() && arrival.taker->data.size() == arrival.frame.bytes;
  arrival.kept = {.tag = arrival.frame.tag, .data = {}};
  if (!fits) arrival.kept.data.resize(arrival.frame.bytes);
  // A message under way belongs to its receive: no other may take it.
  if (arrival.taker != receives_.end()) arrival.taker->from = from;
  return true;
}

void Mailboxes::Complete(std::list<InMessage>::iterator message, int from, uint64_t bytes,
                         Finished& finished) {
  absl::Status status;
  if (bytes != message->data.size()) {
    status = absl::InvalidArgumentError(absl::StrCat("rank ", from, " of the host has sent ", bytes,
                                                     " bytes where ", message->data.size(),
                                                     " were expected"));
  }
  if (message->source != nullptr) *message->source = from;
  finished.emplace_back(std::move(message->done), std::move(status));
  receives_.erase(message);
}

void Mailboxes::EndArrival(int from, Finished& finished) {
  Arrival& arrival = arrivals_[from];
  arrival.begun = false;
  if (arrival.taker != receives_.end()) {
    Complete(arrival.taker, from, arrival.frame.bytes, finished);
  } else {
    // A receive of the tag may have been added meanwhile. It comes before the next message.
    kept_[from].push_back(std::move(arrival.kept));
    TakeKept(from, finished);
  }
}

// Gives messages that came before others of their tag were asked for to their receives.
void Mailboxes::TakeKept(int from, Finished& finished) {
  std::list<Kept>& kept = kept_[from];
  for (auto message = receives_.begin(); message != receives_.end() && !kept.empty();) {
    const auto next = std::next(message);
    const bool under_way = arrivals_[from].begun && arrivals_[from].taker == message;
    const auto found = std::find_if(kept.begin(), kept.end(), [&](const Kept& one) {
      return one.tag == message->tag && (message->from == from || message->from < 0) && !under_way;
    });
    if (found != kept.end()) {
      const size_t bytes = found->data.size();
      if (bytes == message->data.size() && bytes > 0) {
        std::memcpy(message->data.data(), found->data.data(), bytes);
      }
      kept.erase(found);
      moved_ = true;
      Complete(message, from, bytes, finished);
    }
    message = next;
  }
}

void Mailboxes::AdvanceReceives(int from, Finished& finished) {
  if (!kept_[from].empty()) TakeKept(from, finished);
  MailboxHeader& box = group_->segment().mailbox(from, group_->member());
  while (arrivals_[from].begun || BeginArrival(from)) {
    Arrival& arrival = arrivals_[from];
    const uint64_t read = box.read.load(std::memory_order_relaxed);
    const size_t there = box.written.load(std::memory_order_acquire) - read;
    const size_t count = std::min<size_t>(there, arrival.frame.bytes - arrival.received);
    if (count > 0) {
      const bool fits = arrival.kept.data.empty();
      std::byte* const to = fits ? arrival.taker->data.data() : arrival.kept.data.data();
      TakeFrom(box, read, to + arrival.received, count);
      box.read.store(read + count, std::memory_order_release);
      moved_ = true;
      arrival.received += count;
    }
    if (arrival.received < arrival.frame.bytes) return;
    EndArrival(from, finished);
  }
}

// Returns true when a member has left and this member has read all of its messages.
bool Mailboxes::HasNoMoreFrom(int member) const {
  if (!group_->has_left(member)) return false;  // read first: the messages came before the leave
  const MailboxHeader& box = group_->segment().mailbox(member, group_->member());
  return box.written.load(std::memory_order_acquire) == box.read.load(std::memory_order_relaxed);
}

bool Mailboxes::FailHopeless(int64_t now_ns, Finished& finished) {
  bool late = false;
  const auto reason = [&](int member, bool gone, int64_t deadline_ns) {
    if (gone) {
      return absl::UnavailableError(absl::StrCat("rank ", member, " of the host has left"));
    }
    if (now_ns < deadline_ns) return absl::OkStatus();
    late = true;
    return absl::DeadlineExceededError(
        member < 0 ? std::string("Timed out: no rank has sent a message")
                   : absl::StrCat("Timed out waiting for rank ", member, " of the host"));
  };
  for (auto message = receives_.begin(); message != receives_.end();) {
    const auto next = std::next(message);
    const bool gone = message->from >= 0 && HasNoMoreFrom(message->from);
    absl::Status status = reason(message->from, gone, message->deadline_ns);
    if (!status.ok()) {
      for (Arrival& arrival : arrivals_) {
        if (arrival.begun && arrival.taker == message) arrival.begun = false;
      }
      finished.emplace_back(std::move(message->done), std::move(status));
      receives_.erase(message);
    }
    message = next;
  }
  for (int to = 0; to < group_->size(); ++to) {
    while (!outgoing_[to].empty()) {
      absl::Status status = reason(to, group_->has_left(to), outgoing_[to].front().deadline_ns);
      if (status.ok()) break;
      finished.emplace_back(std::move(outgoing_[to].front().done), std::move(status));
      outgoing_[to].pop_front();
      --sends_;
    }
  }
  return late;
}

void Mailboxes::FailAll(const absl::Status& status, Finished& finished) {
  for (InMessage& message : receives_) finished.emplace_back(std::move(message.done), status);
  for (std::deque<OutMessage>& queue : outgoing_) {
    for (OutMessage& message : queue) finished.emplace_back(std::move(message.done), status);
    queue.clear();
  }
  receives_.clear();
  for (Arrival& arrival : arrivals_) arrival.begun = false;
  sends_ = 0;
}

int64_t Mailboxes::earliest_deadline_ns() const {
  int64_t earliest = std::numeric_limits<int64_t>::max();
  for (const InMessage& message : receives_) earliest = std::min(earliest, message.deadline_ns);
  for (const std::deque<OutMessage>& queue : outgoing_) {
    if (!queue.empty()) earliest = std::min(earliest, queue.front().deadline_ns);
  }
  return earliest;
}

}  // namespace ddp::internal
