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
    : group_(group), outgoing_(group->size()), inboxes_(group->size()) {}

void Mailboxes::Send(int to, uint64_t tag, std::span<const std::byte> data, int64_t deadline_ns,
                     Done done) {
  outgoing_[to].push_back({.frame = {.tag = tag, .bytes = data.size()},
                           .data = data,
                           .deadline_ns = deadline_ns,
                           .done = std::move(done)});
  ++sends_;
}

void Mailboxes::Receive(int from, uint64_t tag, std::span<std::byte> data, int64_t deadline_ns,
                        Done done) {
  inboxes_[from].receives.push_back(
      {.tag = tag, .data = data, .deadline_ns = deadline_ns, .done = std::move(done)});
  ++receives_;
}

bool Mailboxes::Advance(Finished& finished) {
  bool moved = false;
  for (int member = 0; member < group_->size() && !empty(); ++member) {
    moved_ = false;
    if (!outgoing_[member].empty()) AdvanceSends(member, finished);
    if (receives_ > 0) AdvanceReceives(member, finished);
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

// Reads the frame of the next message, and finds the memory for it. False: nothing is to be read.
bool Mailboxes::BeginArrival(int from) {
  Inbox& inbox = inboxes_[from];
  if (inbox.receives.empty()) return false;
  MailboxHeader& box = group_->segment().mailbox(from, group_->member());
  const uint64_t read = box.read.load(std::memory_order_relaxed);
  if (box.written.load(std::memory_order_acquire) - read < sizeof(Frame)) return false;
  TakeFrom(box, read, reinterpret_cast<std::byte*>(&inbox.frame), sizeof(Frame));
  box.read.store(read + sizeof(Frame), std::memory_order_release);
  moved_ = true;
  inbox.begun = true;
  inbox.received = 0;
  const auto first =
      std::ranges::find(inbox.receives, inbox.frame.tag, [](const auto& one) { return one.tag; });
  if (first != inbox.receives.end() && first->data.size() == inbox.frame.bytes) {
    inbox.taker.splice(inbox.taker.end(), inbox.receives, first);
  } else {
    inbox.data.resize(inbox.frame.bytes);
  }
  return true;
}

// Gives the kept messages to the receives that have asked for them meanwhile.
void Mailboxes::TakeKept(int from, Finished& finished) {
  Inbox& inbox = inboxes_[from];
  for (auto kept = inbox.kept.begin(); kept != inbox.kept.end();) {
    const auto taker =
        std::ranges::find(inbox.receives, kept->tag, [](const auto& one) { return one.tag; });
    if (taker == inbox.receives.end()) {
      ++kept;
      continue;
    }
    absl::Status status;
    if (kept->data.size() != taker->data.size()) {
      status = absl::InvalidArgumentError(absl::StrCat("rank ", from, " of the host has sent ",
                                                       kept->data.size(), " bytes where ",
                                                       taker->data.size(), " were expected"));
    } else {
      std::ranges::copy(kept->data, taker->data.begin());
    }
    moved_ = true;
    finished.emplace_back(std::move(taker->done), std::move(status));
    inbox.receives.erase(taker);
    --receives_;
    kept = inbox.kept.erase(kept);
  }
}

void Mailboxes::AdvanceReceives(int from, Finished& finished) {
  Inbox& inbox = inboxes_[from];
  TakeKept(from, finished);
  MailboxHeader& box = group_->segment().mailbox(from, group_->member());
  while (inbox.begun || BeginArrival(from)) {
    const uint64_t read = box.read.load(std::memory_order_relaxed);
    const size_t there = box.written.load(std::memory_order_acquire) - read;
    const size_t count = std::min<size_t>(there, inbox.frame.bytes - inbox.received);
    if (count > 0) {
      const bool taken = !inbox.taker.empty();
      std::byte* const to = taken ? inbox.taker.front().data.data() : inbox.data.data();
      TakeFrom(box, read, to + inbox.received, count);
      box.read.store(read + count, std::memory_order_release);
      moved_ = true;
      inbox.received += count;
    }
    if (inbox.received < inbox.frame.bytes) return;
    inbox.begun = false;
    if (inbox.taker.empty()) {
      inbox.kept.push_back({.tag = inbox.frame.tag, .data = std::move(inbox.data)});
      inbox.data = {};
      TakeKept(from, finished);
    } else {
      finished.emplace_back(std::move(inbox.taker.front().done), absl::OkStatus());
      inbox.taker.clear();
      --receives_;
    }
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
        absl::StrCat("Timed out waiting for rank ", member, " of the host"));
  };
  for (int from = 0; from < group_->size(); ++from) {
    Inbox& inbox = inboxes_[from];
    for (std::list<InMessage>* const list : {&inbox.taker, &inbox.receives}) {
      receives_ -= std::erase_if(*list, [&](InMessage& message) {
        absl::Status status = reason(from, HasNoMoreFrom(from), message.deadline_ns);
        if (status.ok()) return false;
        finished.emplace_back(std::move(message.done), std::move(status));
        return true;
      });
    }
    // The rest of a message without its receive: no more is read, as the group is at an end.
    if (inbox.begun && inbox.taker.empty() && inbox.data.empty()) inbox.begun = false;
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
  for (Inbox& inbox : inboxes_) {
    for (std::list<InMessage>* const list : {&inbox.taker, &inbox.receives}) {
      for (InMessage& message : *list) finished.emplace_back(std::move(message.done), status);
      list->clear();
    }
    inbox.begun = false;
  }
  for (std::deque<OutMessage>& queue : outgoing_) {
    for (OutMessage& message : queue) finished.emplace_back(std::move(message.done), status);
    queue.clear();
  }
  sends_ = receives_ = 0;
}

int64_t Mailboxes::earliest_deadline_ns() const {
  int64_t earliest = std::numeric_limits<int64_t>::max();
  for (const Inbox& inbox : inboxes_) {
    for (const InMessage& one : inbox.taker) earliest = std::min(earliest, one.deadline_ns);
    for (const InMessage& one : inbox.receives) earliest = std::min(earliest, one.deadline_ns);
  }
  for (const std::deque<OutMessage>& queue : outgoing_) {
    if (!queue.empty()) earliest = std::min(earliest, queue.front().deadline_ns);
  }
  return earliest;
}

}  // namespace ddp::internal
