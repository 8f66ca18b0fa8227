// How a collective is carried out.
//
// Every collective goes in rounds. In a round each member copies a piece of its input into its
// staging buffer, gives a signal, waits for the signals of the others, and takes what it needs out
// of their buffers. The member that gives a signal last wakes the others. The two halves of a
// buffer take turns: before a member fills a half again it has seen every member's signal of the
// round between, which each gave after it had read the half.
//
// When the inputs lie in arenas, members read them there, and an all-reduce reduces them where they
// lie: member r reduces slice r in the memory of all members. When members that follow each other
// share a NUMA node, they reduce among themselves first: see StepOf().
//
// The signal of the first round, and up to 16 bytes of data, stand in the same cache line as the
// header, which the members compare. So while no member sleeps, this line is the only one that a
// small collective takes from another member's core.
//
// Length: the steps of one protocol, whose order is the proof that no buffer is written while
// another member reads it.

#include "ddp/comm/shared_memory/collective_engine.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/shared_memory/reduction_steps.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;

// How long an operation that no thread waits for stays as it is, when the members have no cores to
// spare. Then the group's thread takes it up.
constexpr absl::Duration kNap = absl::Milliseconds(5);
// After this many naps without an operation the thread sleeps until it is kicked.
constexpr int kIdleNaps = 100;

// From this size on, over the number of members, a staged all-reduce of more than two members
// divides the additions among them. It has one more wait; without it, each member adds the data of
// all.
constexpr size_t kSharedReduction = size_t{64} << 10;

// From this size on, an all-reduce in place goes by NUMA nodes. It has two more waits.
constexpr size_t kGroupedFrom = size_t{1} << 20;

// From this size on, memory in an arena is used where it lies, when that of all members can be. A
// copy into a staging buffer takes longer than the wait at the end that this needs.
constexpr size_t kDirectFrom = size_t{4} << 10;

// Of memory that is read or written in an arena without a look at the end of the group.
constexpr size_t kDirectPiece = size_t{256} << 10;

// How long a failed operation waits for a member that still writes into its memory. A piece takes
// microseconds, unless the member is stopped.
constexpr absl::Duration kQuiesce = absl::Seconds(1);

// Of CollectiveEngine::MayAdvance(): messages are under way, or a thread advances.
constexpr uint64_t kAnything = ~uint64_t{0};

// Of a slice or of a part in a staging buffer.
constexpr size_t kAlignment = 64;

int64_t DeadlineAfter(absl::Duration timeout) {
  if (timeout >= absl::Hours(24 * 365)) return std::numeric_limits<int64_t>::max();
  return MonotonicNanoseconds() + absl::ToInt64Nanoseconds(timeout);
}

bool Reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }

// True when a member has a part for each member.
bool HasParts(Kind kind) { return kind == Kind::kAllToAll || kind == Kind::kReduceScatter; }

// True when the inputs can be used where they lie.
bool MayBeDirect(Kind kind) { return kind != Kind::kBarrier && kind != Kind::kAllGatherSized; }

// Returns 1 + the offset in this process's arena of the inputs, when these are one region of it
// without gaps; else 0.
uint64_t RegisteredAt(const CollectiveRequest& request) {
  const bool uneven = HasParts(request.kind) && request.elements == 0;
  if (request.inputs.empty() || uneven) return 0;
  const std::byte* end = request.inputs.front().data();
  for (const auto& input : request.inputs) {
    if (input.data() != end) return 0;
    end += input.size();
  }
  const std::byte* const begin = request.inputs.front().data();
  const Arena& arena = Arena::OfProcess();
  if (!arena.Contains(begin, static_cast<size_t>(end - begin))) return 0;
  return 1 + static_cast<uint64_t>(begin - arena.base());
}

size_t LongestPart(const CollectiveRequest& request) {
  size_t longest = 0;
  for (const auto& part : request.inputs) longest = std::max(longest, part.size());
  for (const auto& part : request.outputs) longest = std::max(longest, part.size());
  return longest;
}

}  // namespace

CollectiveKey KeyOf(const CollectiveRequest& request) {
  return {.elements = request.kind == Kind::kAllGatherSized ? 0 : request.elements,
          .root = request.root,
          .tag = request.tag.value_or(0),
          .kind = static_cast<uint16_t>(request.kind),
          .reduction = static_cast<uint16_t>(request.reduction),
          .type = static_cast<uint16_t>(request.type),
          .tagged = request.tag.has_value()};
}

struct CollectiveEngine::Operation {
  // The next step of an operation. Each state but kEnter begins with a wait for the signals of all
  // members.
  enum class State : uint8_t {
    kEnter,    // announce, and fill when one round may do -> kAgree
    kAgree,    // compare -> kFill, kTake, kDirect or complete
    kFill,     // fill the next round -> kTake
    kTake,     // take from the others' buffers -> kFill or complete; or add a slice -> kSlices
    kSlices,   // take the others' slices -> kFill or complete
    kInPlace,  // carry out the next step of a reduction in place -> kInPlace or kLeave
    kLeave,    // every member has finished with the others' arenas -> complete
    kGivenUp,  // the members differ, or the group has ended: a later look fails it
  };

  CollectiveRequest request;
  Done done;
  int64_t deadline_ns = 0;
  State state = State::kEnter;
  Awaited await = 0;            // the signal of all members that the state begins with
  size_t parts = 1;             // in one staging buffer
  size_t piece = 0;             // bytes of one part in one round
  size_t rounds = 1;            // of data, that all members need
  size_t next = 0;              // the round of data that is filled next
  int step = 0;                 // of a reduction in place
  int announced = 0;            // the half of the announcements of the first round
  bool announced_data = false;  // the data of all members have come with the announcements
  bool complete = false;
  absl::Status status;

  size_t offset() const { return (next - 1) * piece; }  // of the round that was filled last
  size_t length() const { return request.inputs.empty() ? 0 : request.inputs.front().size(); }
};

namespace {

int GroupOnNodesOf(const HostGroup& group) {
  std::vector<int> nodes;
  for (int member = 0; member < group.size(); ++member) {
    nodes.push_back(group.segment().row(member).numa_node);
  }
  return GroupOnNodes(nodes);
}

}  // namespace

CollectiveEngine::CollectiveEngine(HostGroup* group)
    : group_(group),
      member_(group->member()),
      size_(group->size()),
      group_of_node_(GroupOnNodesOf(*group)),
      mailboxes_(group) {
  group_->SetBackground([this] { return OnWake(); });
}

CollectiveEngine::~CollectiveEngine() {
  if (group_->in_forked_child()) return;  // the operations are the parent's
  group_->SetBackground(nullptr);
  (void)Abort();
}

bool CollectiveEngine::Abort() {
  if (group_->in_forked_child()) return true;  // a thread of the parent may hold the lock
  Locked([this](Finished& finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!idle()) group_->Abort();
    FailAll(absl::CancelledError("the backend was destroyed or aborted"), finished);
  });
  return !group_->ended() || group_->Quiesce(absl::Seconds(1));
}

void CollectiveEngine::Wake() {
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  group_->Kick();
}

// ---- Starting and driving.

void CollectiveEngine::Start(CollectiveRequest request, absl::Duration timeout, Done done) {
  auto operation = std::make_unique<Operation>();
  operation->parts = HasParts(request.kind) ? static_cast<size_t>(size_) : 1;
  operation->piece = kStagingBytes / operation->parts / kAlignment * kAlignment;
  operation->deadline_ns = DeadlineAfter(timeout);
  operation->request = std::move(request);
  operation->done = std::move(done);
  Begin([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { queue_.push_back(std::move(operation)); });
}

void CollectiveEngine::Send(int to, uint64_t tag, std::span<const std::byte> data,
                            absl::Duration timeout, Done done) {
  Begin([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    mailboxes_.Send(to, tag, data, DeadlineAfter(timeout), std::move(done));
  });
}

void CollectiveEngine::Receive(int from, uint64_t tag, std::span<std::byte> data,
                               absl::Duration timeout, Done done) {
  Begin([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    mailboxes_.Receive(from, tag, data, DeadlineAfter(timeout), std::move(done));
  });
}

void CollectiveEngine::StartOwn(OwnProtocol protocol, absl::Duration timeout, Done done) {
  Begin([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    own_.push_back({.protocol = std::move(protocol),
                    .deadline_ns = DeadlineAfter(timeout),
                    .done = std::move(done)});
    epoch_.fetch_add(1, std::memory_order_seq_cst);  // threads in Drive() look at it, too
  });
}

// Adds an operation, advances it, and makes sure that the group's thread looks at what is left: at
// once where the members have cores to spare.
template <typename Add>
void CollectiveEngine::Begin(const Add& add) {
  bool kick = false;
  Locked([&](Finished& finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    add();
    naps_ = 0;
    AdvanceOrFail(finished);
    if (idle()) return;
    kick = std::exchange(asleep_, false);
    if (group_->cores_to_spare()) kick |= !std::exchange(hurried_, true);
  });
  if (kick) group_->Kick();
}

template <typename Act>
void CollectiveEngine::Locked(const Act& act) {
  Finished finished;
  {
    MutexLock lock(mutex_);
    awaited_.store(kAnything, std::memory_order_release);  // a thread that looks now has to wait
    act(finished);
    // What Drive() reads without the lock.
    busy_.store(!idle(), std::memory_order_release);
    const Awaited first = queue_.empty() ? 0 : queue_.front()->await;
    awaited_.store(mailboxes_.empty() ? first : kAnything, std::memory_order_release);
  }
  Call(std::move(finished));
}

void CollectiveEngine::Poll() {
  Locked([this](Finished& finished)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { AdvanceOrFail(finished); });
}

void CollectiveEngine::Call(Finished&& finished) {
  if (finished.empty()) return;
  // The caller may use the memory of a failed operation from now on.
  if (exposed_.load(std::memory_order_acquire)) (void)group_->Quiesce(kQuiesce);
  for (auto& [done, status] : finished) {
    if (done) done(status);
  }
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  group_->NotifyOwn();  // a thread of this member may wait for what `done` has changed
}

// Returns true when Advance() may have something to do. Takes no lock: a thread that waits would
// keep other threads from starting operations.
bool CollectiveEngine::MayAdvance(const OwnLooks& own) const {
  const Awaited awaited = awaited_.load(std::memory_order_acquire);
  if (awaited == kAnything) return true;
  for (const auto& may_advance : own) {
    if (may_advance()) return true;
  }
  return awaited != 0 && AllSignalled(awaited);
}

bool CollectiveEngine::Drive(const std::function<bool()>& stop, absl::Time deadline) {
  const int64_t deadline_ns = absl::ToUnixNanos(deadline);
  while (!stop()) {
    const uint64_t epoch = epoch_.load(std::memory_order_acquire);
    OwnLooks own;
    int64_t until_ns = deadline_ns;  // then Poll() has something to fail
    {
      MutexLock lock(mutex_);
      until_ns = std::min(until_ns, mailboxes_.earliest_deadline_ns());
      if (!queue_.empty()) until_ns = std::min(until_ns, queue_.front()->deadline_ns);
      for (const OwnOperation& operation : own_) {
        until_ns = std::min(until_ns, operation.deadline_ns);
        own.push_back(operation.protocol.may_advance);
      }
    }
    const auto changed = [&] {
      if (MayAdvance(own)) {
        Locked([this](Finished& finished)
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { Advance(finished); });
      }
      return epoch_.load(std::memory_order_acquire) != epoch;
    };
    if (group_->Wait(changed, stop, until_ns)) continue;
    Poll();
    if (stop()) return true;
    const int64_t now_ns = MonotonicNanoseconds();
    if (now_ns >= deadline_ns) return false;
    if (group_->ended() && !busy_.load(std::memory_order_acquire)) {
      // Another thread may have failed the operation, and be about to call `done`.
      const auto called = [&] { return epoch_.load(std::memory_order_seq_cst) != epoch || stop(); };
      group_->Doze(called, std::min(kNap, absl::Nanoseconds(deadline_ns - now_ns)));
    }
  }
  return true;
}

// The group's thread.
HostGroup::Nap CollectiveEngine::OnWake() {
  bool hurried = false;
  {
    MutexLock lock(mutex_);
    // An operation that has been there for a whole nap is waited for by no thread. After the end of
    // the group every operation fails at once.
    hurried = hurried_ = !idle() && (hurried_ || naps_ > 0 || group_->ended());
    if (idle() && naps_ > kIdleNaps) {
      asleep_ = true;
      return {};
    }
    ++naps_;
  }
  if (!hurried) return {.longest = kNap};
  Poll();
  MutexLock lock(mutex_);
  hurried_ = !idle();
  return {.longest = kNap, .wake_on_notify = hurried_};
}

// ---- The protocol.

bool CollectiveEngine::AllSignalled(Awaited awaited) const {
  const uint64_t number = awaited >> 2;
  const int half = static_cast<int>(awaited & 3) - 1;
  if (half < 0) {
    return group_->segment().header().arrivals.load(std::memory_order_acquire) >= number;
  }
  if (seen_.load(std::memory_order_acquire) >= number) return true;
  for (int step = 1; step <= size_; ++step) {  // from the next member on: each has another order
    const MemberRow& row = group_->segment().row((member_ + step) % size_);
    if (row.announcements[half].signal.load(std::memory_order_acquire) < number) return false;
  }
  seen_.store(number, std::memory_order_release);
  return true;
}

// Gives a signal that announces no header.
CollectiveEngine::Awaited CollectiveEngine::Signal() {
  const Segment& segment = group_->segment();
  segment.row(member_).signals.store(++signals_, std::memory_order_release);
  const Awaited awaited = (arrivals_ += size_) << 2;
  segment.header().arrivals.fetch_add(1, std::memory_order_seq_cst);
  group_->NotifyIf([&] { return AllSignalled(awaited); });
  return awaited;
}

// Gives the signal that announces the header of this half.
CollectiveEngine::Awaited CollectiveEngine::SignalHeader() {
  MemberRow& row = group_->segment().row(member_);
  row.signals.store(++signals_, std::memory_order_release);
  row.announcements[half()].signal.store(signals_, std::memory_order_release);
  const Awaited awaited = signals_ << 2 | static_cast<uint64_t>(half() + 1);
  group_->NotifyIf([&] { return AllSignalled(awaited); });
  return awaited;
}

void CollectiveEngine::Advance(Finished& finished) {
  mailboxes_.Advance(finished);
  AdvanceCollectives(finished);
  for (auto operation = own_.begin(); operation != own_.end() && broken_.ok();) {
    if (!operation->protocol.advance()) {
      ++operation;
      continue;
    }
    finished.emplace_back(std::move(operation->done), absl::OkStatus());
    operation = own_.erase(operation);
  }
  if (idle()) return;
  if (broken_.ok() && group_->ended()) broken_ = EndStatus();
  if (!broken_.ok()) FailAll(broken_, finished);
}

void CollectiveEngine::AdvanceCollectives(Finished& finished) {
  while (!queue_.empty()) {
    Operation& first = *queue_.front();
    if (!Step(first)) return;
    if (!first.complete) continue;
    if (!first.status.ok() && broken_.ok()) {
      broken_ = first.status;
      group_->Abort();
    }
    finished.emplace_back(std::move(first.done), first.status);
    queue_.pop_front();
  }
}

bool CollectiveEngine::Step(Operation& operation) {
  using State = Operation::State;
  if (!broken_.ok()) return false;
  if (operation.state == State::kEnter) {
    operation.await = filled_;
    // Another member may have given up the very collective that this one would begin.
    if (group_->ended()) return false;
  }
  if (operation.state == State::kGivenUp || !AllSignalled(operation.await)) return false;
  switch (operation.state) {
    case State::kEnter:
      Enter(operation);
      return true;
    case State::kAgree:
      Agree(operation);
      return true;
    case State::kFill:
      FillRound(operation);
      return true;
    case State::kTake:
      DrainRound(operation);
      return true;
    case State::kSlices:
      GatherSlices(operation);
      return true;
    case State::kInPlace:
      ReduceInPlace(operation);
      return true;
    case State::kLeave:
      operation.complete = true;
      return true;
    case State::kGivenUp:
      return false;
  }
  return false;
}

// Announces the operation in a round of its own. When the data of this member fits into one round,
// and cannot be used where it lies, it goes along.
void CollectiveEngine::Enter(Operation& operation) {
  const CollectiveRequest& request = operation.request;
  const size_t longest = LongestPart(request);
  const size_t rounds = std::max<size_t>(1, (longest + operation.piece - 1) / operation.piece);
  const uint64_t registered = MayBeDirect(request.kind) ? RegisteredAt(request) : 0;
  const bool filled = rounds == 1 && (registered == 0 || longest < kDirectFrom);
  ++round_;
  group_->segment().row(member_).announcements[half()].header = {
      .key = KeyOf(request),
      .data = !filled ? RoundData::kElsewhere
              : longest <= Announcement::kDataBytes && operation.parts == 1
                  ? RoundData::kInAnnouncement
                  : RoundData::kInStaging,
      .rounds = static_cast<uint32_t>(rounds),
      .registered_or_bytes = request.kind == Kind::kAllGatherSized ? longest : registered};
  if (filled) Fill(operation, 0, DataOf(member_, half()));
  operation.announced = half();
  operation.await = filled_ = SignalHeader();
  operation.state = Operation::State::kAgree;
}

void CollectiveEngine::Agree(Operation& operation) {
  const RoundHeader& mine = group_->segment().row(member_).announcements[half()].header;
  const bool sized = operation.request.kind == Kind::kAllGatherSized;
  bool direct = MayBeDirect(operation.request.kind);
  bool filled = true;
  std::vector<size_t> sizes;
  for (int member = 0; member < size_ && mine.data == RoundData::kInStaging; ++member) {
    __builtin_prefetch(group_->segment().staging(member, half()));
  }
  for (int member = 0; member < size_; ++member) {
    const RoundHeader& theirs = group_->segment().row(member).announcements[half()].header;
    if (theirs.key != mine.key) {
      operation.state = Operation::State::kGivenUp;
      if (operation.request.tag.has_value()) return;
      operation.complete = true;
      operation.status = absl::InvalidArgumentError(
          absl::StrCat("rank ", member, " of the host has started another collective than rank ",
                       member_, ", or one of another size or type"));
      return;
    }
    operation.rounds = std::max<size_t>(operation.rounds, theirs.rounds);
    filled &= theirs.data != RoundData::kElsewhere;
    if (sized) sizes.push_back(theirs.registered_or_bytes);
    const bool has_input =
        operation.request.kind != Kind::kBroadcast || member == operation.request.root;
    if (has_input && DirectSource(operation, member, 0) == nullptr) direct = false;
  }
  if (sized) {
    const auto outputs = operation.request.on_sizes(sizes);
    operation.request.outputs.assign(outputs.begin(), outputs.end());
  }
  if (filled) {
    operation.next = 1;
    operation.announced_data = true;
    return DrainRound(operation);
  }
  if (direct) return GoDirect(operation);
  FillRound(operation);
}

// The members have seen this member's last filling, and this member theirs: so all have finished
// with the half that is filled now.
void CollectiveEngine::FillRound(Operation& operation) {
  ++round_;
  Fill(operation, operation.next * operation.piece, group_->segment().staging(member_, half()));
  ++operation.next;
  operation.await = filled_ = Signal();
  operation.state = Operation::State::kTake;
}

// Returns where a member's data are that have come with its announcement.
std::byte* CollectiveEngine::DataOf(int member, int half) const {
  Announcement& announcement = group_->segment().row(member).announcements[half];
  return announcement.header.data == RoundData::kInAnnouncement
             ? announcement.data
             : group_->segment().staging(member, half);
}

void CollectiveEngine::Fill(const Operation& operation, size_t offset, std::byte* buffer) {
  for (size_t part = 0; part < operation.request.inputs.size(); ++part) {
    const auto& input = operation.request.inputs[part];
    if (offset >= input.size()) continue;
    std::memcpy(buffer + part * operation.piece, input.data() + offset,
                std::min(operation.piece, input.size() - offset));
  }
}

void CollectiveEngine::DrainRound(Operation& operation) {
  const CollectiveRequest& request = operation.request;
  const size_t offset = operation.offset();
  const Segment& segment = group_->segment();
  const int half = this->half();
  const auto source = [&](int member, int part) -> const std::byte* {
    const std::byte* const data =
        operation.announced_data ? DataOf(member, half) : segment.staging(member, half);
    return data + static_cast<size_t>(part) * operation.piece;
  };
  const size_t length = operation.length();
  const size_t bytes = std::min(operation.piece, length - std::min(length, offset));
  if (request.kind != Kind::kAllReduce || size_ <= 2 || bytes < kSharedReduction / size_) {
    Take(operation, offset, operation.piece, source);
    return FinishRound(operation);
  }
  const size_t element = SizeOf(request.type);
  const Slice slice = SliceOf(bytes / element, element, member_, size_);
  absl::InlinedVector<const std::byte*, 16> inputs;
  for (int member = 0; member < size_; ++member) {
    inputs.push_back(source(member, 0) + slice.begin * element);
  }
  // No other member reads this slice before the next signal.
  std::byte* const outputs[] = {segment.staging(member_, half) + slice.begin * element,
                                request.outputs.front().data() + offset + slice.begin * element};
  ReduceTree(request.reduction, request.type, inputs, outputs, slice.count);
  operation.await = Signal();
  operation.state = Operation::State::kSlices;
}

void CollectiveEngine::GatherSlices(Operation& operation) {
  const CollectiveRequest& request = operation.request;
  const size_t offset = operation.offset();
  const size_t bytes = std::min(operation.piece, operation.length() - offset);
  const size_t element = SizeOf(request.type);
  for (int step = 1; step < size_; ++step) {
    const int member = (member_ + step) % size_;
    const Slice slice = SliceOf(bytes / element, element, member, size_);
    std::memcpy(request.outputs.front().data() + offset + slice.begin * element,
                group_->segment().staging(member, half()) + slice.begin * element,
                slice.count * element);
  }
  FinishRound(operation);
}

void CollectiveEngine::FinishRound(Operation& operation) {
  if (operation.next < operation.rounds) {
    operation.state = Operation::State::kFill;
    operation.await = filled_;
    return;
  }
  operation.complete = true;
}

// Takes what this member needs of the bytes from `offset` on, at most `limit` of each part.
// `source(member, part)` is where the member's bytes from `offset` on are.
template <typename Source>
void CollectiveEngine::Take(const Operation& operation, size_t offset, size_t limit,
                            const Source& source) {
  const CollectiveRequest& request = operation.request;
  const auto length = [&](std::span<std::byte> output) {
    return offset >= output.size() ? 0 : std::min(limit, output.size() - offset);
  };
  if (request.outputs.empty()) return;
  if (Reduces(request.kind)) {
    const int part = request.kind == Kind::kReduceScatter ? member_ : 0;
    absl::InlinedVector<const std::byte*, 16> inputs;
    for (int member = 0; member < size_; ++member) {
      inputs.push_back(member == member_ ? request.inputs[part].data() + offset
                                         : source(member, part));
    }
    std::byte* const output = request.outputs.front().data() + offset;
    ReduceTree(request.reduction, request.type, inputs, std::span(&output, 1),
               length(request.outputs.front()) / SizeOf(request.type));
    return;
  }
  if (request.kind == Kind::kBroadcast) {
    const auto output = request.outputs.front();
    if (length(output) > 0) {
      std::memcpy(output.data() + offset, source(request.root, 0), length(output));
    }
    return;
  }
  for (int step = 0; step < size_; ++step) {
    const int member = (member_ + step) % size_;
    const auto output = request.outputs[member];
    const int part = request.kind == Kind::kAllToAll ? member_ : 0;
    if (length(output) > 0) {
      const std::byte* const from =
          member == member_ ? request.inputs[part].data() + offset : source(member, part);
      std::memmove(output.data() + offset, from, length(output));
    }
  }
}

// ---- In the arenas.

// Returns the address of a member's part. Null when the member's tensor is not in an arena, or the
// member has announced an impossible address.
const std::byte* CollectiveEngine::DirectSource(const Operation& operation, int member,
                                                int part) const {
  const RoundHeader& theirs =
      group_->segment().row(member).announcements[operation.announced].header;
  if (theirs.registered_or_bytes == 0) return nullptr;
  const size_t bytes = operation.request.elements * SizeOf(operation.request.type);
  const std::byte* const begin =
      group_->InArena(member, theirs.registered_or_bytes - 1, bytes * operation.parts);
  return begin == nullptr ? nullptr : begin + static_cast<size_t>(part) * bytes;
}

void CollectiveEngine::GoDirect(Operation& operation) {
  const CollectiveRequest& request = operation.request;
  if (request.kind == Kind::kAllReduce) return ReduceInPlace(operation);
  const size_t longest = LongestPart(request);
  for (size_t offset = 0; offset < longest; offset += kDirectPiece) {
    if (group_->ended()) {  // Advance() says why
      operation.state = Operation::State::kGivenUp;
      return;
    }
    Take(operation, offset, kDirectPiece,
         [&](int member, int part) { return DirectSource(operation, member, part) + offset; });
  }
  operation.await = Signal();
  operation.state = Operation::State::kLeave;
}

// Carries out this member's next step in the memory of all members.
void CollectiveEngine::ReduceInPlace(Operation& operation) {
  const CollectiveRequest& request = operation.request;
  const size_t element = SizeOf(request.type);
  const int group = operation.length() < kGroupedFrom ? size_ : group_of_node_;
  const ReductionStep step =
      StepOf(operation.step, member_, size_, group, operation.length() / element, element);
  const auto memory_of = [&](const Members& members, size_t begin) {
    absl::InlinedVector<std::byte*, 16> memory;
    for (int i = 0; i < members.count; ++i) {
      const int member = members.first + i * members.stride;
      memory.push_back(const_cast<std::byte*>(DirectSource(operation, member, 0)) +
                       begin * element);
    }
    return memory;
  };
  const size_t longest = kDirectPiece / element;
  for (size_t done = 0; done < step.slice.count; done += longest) {
    const auto inputs = memory_of(step.from, step.slice.begin + done);
    const auto outputs = memory_of(step.to, step.slice.begin + done);
    if (!group_->BeginTouch()) {  // Advance() says why
      operation.state = Operation::State::kGivenUp;
      return;
    }
    ReduceTree(request.reduction, request.type, inputs, outputs,
               std::min(longest, step.slice.count - done));
    group_->EndTouch();
  }
  ++operation.step;
  operation.await = Signal();
  operation.state = group == size_ || operation.step == kGroupedSteps ? Operation::State::kLeave
                                                                      : Operation::State::kInPlace;
}

// ---- Failures.

std::string CollectiveEngine::Missing() const {
  std::vector<std::string> missing;
  for (int member = 0; member < size_; ++member) {
    if (group_->segment().row(member).signals.load(std::memory_order_acquire) < signals_) {
      missing.push_back(absl::StrCat(member));
    }
  }
  return absl::StrJoin(missing, ", ");
}

absl::Status CollectiveEngine::EndStatus() const {
  const HostGroup::End end = group_->end();
  if (end.kind == GroupEnd::kDied) {
    return absl::UnavailableError(
        absl::StrCat("the process of rank ", end.member, " of the host has ended"));
  }
  return absl::AbortedError(
      absl::StrCat("rank ", end.member, " of the host has aborted the group"));
}

// Advances everything. Then fails all operations, when one needs a member that has left, or is
// late.
void CollectiveEngine::AdvanceOrFail(Finished& finished) {
  int left = -1;  // found before the last look at what the members that leave have published
  for (int member = 0; member < size_ && left < 0; ++member) {
    if (group_->has_left(member)) left = member;
  }
  Advance(finished);
  if (idle()) return;
  const bool waits = !own_.empty() || (!queue_.empty() && !AllSignalled(queue_.front()->await));
  if (left >= 0 && waits) {
    return Break(absl::UnavailableError(absl::StrCat("rank ", left, " of the host has left")),
                 finished);
  }
  const int64_t now_ns = MonotonicNanoseconds();
  if (!mailboxes_.empty() && mailboxes_.FailHopeless(now_ns, finished)) {
    return Break(absl::CancelledError("a message was given up"), finished);
  }
  if (!queue_.empty() && now_ns >= queue_.front()->deadline_ns) {
    const std::string missing = Missing();
    return Break(
        absl::DeadlineExceededError(
            missing.empty() ? std::string("Timed out: the ranks are in different collectives")
                            : absl::StrCat("Timed out waiting for rank ", missing, " of the host")),
        finished);
  }
  const auto late = [&](const OwnOperation& operation) { return now_ns >= operation.deadline_ns; };
  if (std::any_of(own_.begin(), own_.end(), late)) {
    Break(absl::DeadlineExceededError("Timed out waiting for other ranks of the host"), finished);
  }
}

void CollectiveEngine::Break(const absl::Status& status, Finished& finished) {
  group_->Abort();
  FailAll(status, finished);
}

void CollectiveEngine::FailAll(const absl::Status& status, Finished& finished) {
  if (broken_.ok()) broken_ = status;
  const bool in_place = !queue_.empty() && queue_.front()->state != Operation::State::kEnter &&
                        queue_.front()->request.kind == Kind::kAllReduce &&
                        RegisteredAt(queue_.front()->request) != 0;
  if (in_place || !own_.empty()) {
    exposed_.store(true, std::memory_order_release);  // others may be at a piece of its memory
  }
  for (const auto& operation : queue_) finished.emplace_back(std::move(operation->done), status);
  for (OwnOperation& operation : own_) finished.emplace_back(std::move(operation.done), status);
  queue_.clear();
  own_.clear();
  mailboxes_.FailAll(status, finished);
}

}  // namespace ddp::internal
