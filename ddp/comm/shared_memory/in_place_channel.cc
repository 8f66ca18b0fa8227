#include "ddp/comm/shared_memory/in_place_channel.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <utility>

#include "absl/time/time.h"
#include "ddp/comm/arena/deferred_frees.h"

namespace ddp::internal {
namespace {

// How many arrays that not all members have published a look passes over. Members' orders differ
// little, so an array that is ready is near the front.
constexpr size_t kLookAhead = 16;

// The longest part of an array that one member sums at a time, without a look at the end of the
// group.
constexpr size_t kPiece = size_t{256} << 10;

// A word has the pass in its upper bits. The lower bits of a member's word for an array are the
// place of the array in units of 64 bytes plus kFirstPlace, or one of the two other values. Those
// of the word that counts an array's pieces are the number of pieces that members have taken.
constexpr int kPlaceBits = 40;
constexpr uint64_t kPlaceMask = (uint64_t{1} << kPlaceBits) - 1;
constexpr uint64_t kZeros = 1;
constexpr uint64_t kElsewhere = 2;
constexpr uint64_t kFirstPlace = 3;
constexpr size_t kUnit = 64;

size_t RoundUp(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

uint64_t OfPass(uint64_t pass, uint64_t low) { return (pass << kPlaceBits) | low; }
bool IsOfPass(uint64_t word, uint64_t pass) {
  return word >> kPlaceBits == OfPass(pass, 0) >> kPlaceBits;
}

size_t BytesOfWords(size_t large) { return RoundUp(large * sizeof(uint64_t)); }

}  // namespace

// The beginning of a board. Two words for each large array follow: the words of the places, then
// those that count the pieces. Then come two halves of packed arrays, which take turns pass by
// pass.
struct InPlaceChannel::Board {
  std::atomic<uint64_t> arrivals;  // passes at whose end the member has arrived
  std::atomic<uint64_t> finished;  // passes whose packed arrays the member has summed
  uint64_t large = 0;              // number of words
  uint64_t small_bytes = 0;        // of one half
};

absl::StatusOr<std::unique_ptr<InPlaceChannel>> InPlaceChannel::Make(
    std::shared_ptr<HostGroup> group, Layout layout) {
  const uint64_t number = group->NextBoard();  // also without success: the others go on from here
  const size_t small =
      RoundUp(layout.small_floats * sizeof(float)) + RoundUp(layout.small_doubles * sizeof(double));
  // An odd number: no gradient has that size, so none takes the block.
  const size_t bytes =
      std::max(Arena::kSmallestBlock, kUnit + 2 * BytesOfWords(layout.large.size()) + 2 * small) |
      1;
  DeferredFrees::OfProcess().Sweep();
  Arena& arena = Arena::OfProcess();
  auto demand = arena.AddDemand({.gradient_bytes = {bytes}, .capacity_bytes = bytes});
  if (!demand.ok()) return demand.status();
  auto* const block = static_cast<std::byte*>(arena.Allocate(bytes));
  if (block == nullptr) return absl::ResourceExhaustedError("the arena has no room for a board");
  std::memset(block, 0, bytes);
  std::unique_ptr<InPlaceChannel> channel(
      new InPlaceChannel(group, number, std::move(layout), *std::move(demand), block));
  channel->shown_ = group->ShowBoard(channel->number_, static_cast<uint64_t>(block - arena.base()));
  if (!channel->shown_) {
    return absl::ResourceExhaustedError("the group has too many models at once");
  }
  return channel;
}

InPlaceChannel::InPlaceChannel(std::shared_ptr<HostGroup> group, uint64_t number, Layout layout,
                               ArenaDemand demand, std::byte* block)
    : group_(std::move(group)),
      member_(group_->member()),
      size_(group_->size()),
      layout_(std::move(layout)),
      number_(number),
      demand_(std::move(demand)),
      block_(block),
      small_at_(kUnit + 2 * BytesOfWords(layout_.large.size())),
      doubles_at_(RoundUp(layout_.small_floats * sizeof(float))),
      small_bytes_(doubles_at_ + RoundUp(layout_.small_doubles * sizeof(double))),
      boards_(size_) {
  Board* const board = new (block_) Board{};
  boards_[member_].store(board, std::memory_order_release);
  board->large = layout_.large.size();
  board->small_bytes = small_bytes_;
  waiting_.reserve(layout_.large.size());
  left_out_.reserve(layout_.large.size());
}

InPlaceChannel::~InPlaceChannel() {
  if (group_->in_forked_child()) return;  // the board is the parent's
  (void)Abandon();
  group_->HideBoard(number_);
  // A member that shows no board now has not found this one, and never will.
  struct Reader {
    std::function<bool()> is_gone;
    const Board* board;
  };
  std::vector<Reader> readers;
  for (int member = 0; shown_ && member < size_; ++member) {
    const bool shows = member != member_ && group_->FindBoard(member, number_).has_value();
    if (const Board* const board = shows ? BoardOf(member) : nullptr) {
      readers.push_back({.is_gone = group_->BoardIsGone(member, number_), .board = board});
    }
  }
  // A member reads until it has finished the last pass, or has destroyed its channel. A board that
  // is destroyed meanwhile may show any number.
  const auto unused = [pass = pass_, readers = std::move(readers)] {
    return std::all_of(readers.begin(), readers.end(), [&](const Reader& reader) {
      return reader.is_gone() || reader.board->finished.load(std::memory_order_acquire) >= pass;
    });
  };
  DeferredFrees::OfProcess().Add(
      unused, [block = block_, demand = std::make_shared<ArenaDemand>(std::move(demand_))] {
        Arena::OfProcess().Free(block);
      });
}

bool InPlaceChannel::Abandon() {
  if (group_->in_forked_child()) return true;
  {
    MutexLock lock(mutex_);  // another thread of this process may be in Advance()
    if (!std::exchange(in_pass_, false)) return true;
    group_->Abort();
  }
  return group_->Quiesce(absl::Seconds(1));
}

// ---- Boards.

// Returns the member's board, or null while the member has not made it.
const InPlaceChannel::Board* InPlaceChannel::BoardOf(int member) const {
  if (const Board* const known = boards_[member].load(std::memory_order_acquire)) return known;
  const std::optional<uint64_t> offset = group_->FindBoard(member, number_);
  if (!offset.has_value()) return nullptr;
  const std::byte* const bytes = group_->InArena(member, *offset, small_at_ + 2 * small_bytes_);
  const auto* const board = reinterpret_cast<const Board*>(bytes);
  if (bytes == nullptr || board->large != layout_.large.size() ||
      board->small_bytes != small_bytes_) {
    return nullptr;  // of another layout: the model's ranks have different parameters
  }
  boards_[member].store(board, std::memory_order_release);
  return board;
}

std::atomic<uint64_t>& InPlaceChannel::WordOf(const Board& board, int array) const {
  auto* const words = reinterpret_cast<const std::byte*>(&board) + kUnit;
  return const_cast<std::atomic<uint64_t>&>(
      reinterpret_cast<const std::atomic<uint64_t>*>(words)[array]);
}

// The members count the pieces of an array on one board, and of all arrays on all boards in turn.
std::atomic<uint64_t>& InPlaceChannel::TakenOf(int array) const {
  return (&WordOf(*BoardOf(array % size_),
                  array))[BytesOfWords(layout_.large.size()) / sizeof(uint64_t)];
}

std::byte* InPlaceChannel::SmallOf(int member) const {
  const auto* const board = reinterpret_cast<const std::byte*>(BoardOf(member));
  return const_cast<std::byte*>(board) + small_at_ + (pass_ % 2) * small_bytes_;
}

// ---- A pass.

void InPlaceChannel::Begin(double factor) {
  ++pass_;
  factor_ = factor;
  in_pass_ = false;
  arrived_.store(false, std::memory_order_relaxed);
  waiting_.clear();
  left_out_.clear();
}

// The array that is published now is left to a later look, of this member or another one: see the
// class comment.
void InPlaceChannel::PublishWord(int array, uint64_t word) {
  in_pass_ = true;
  WordOf(*BoardOf(member_), array).store(OfPass(pass_, word), std::memory_order_release);
  group_->NotifyIf([&] { return AllPublished(array); });
  Help(kLookAhead);
  waiting_.push_back(array);
}

void InPlaceChannel::Publish(int array, uint64_t offset) {
  PublishWord(array, offset / kUnit + kFirstPlace);
}

void InPlaceChannel::PublishZeros(int array) { PublishWord(array, kZeros); }

void InPlaceChannel::PublishElsewhere(int array) { PublishWord(array, kElsewhere); }

bool InPlaceChannel::AllPublished(int array) const {
  for (int member = 0; member < size_; ++member) {
    const Board* const board = BoardOf(member);
    if (board == nullptr ||
        !IsOfPass(WordOf(*board, array).load(std::memory_order_acquire), pass_)) {
      return false;
    }
  }
  return true;
}

void InPlaceChannel::Help(size_t look_ahead) {
  size_t passed = 0;
  size_t kept = 0;
  size_t i = 0;
  for (; i < waiting_.size() && passed < look_ahead; ++i) {
    if (AllPublished(waiting_[i])) {
      Sum(waiting_[i]);
    } else {
      waiting_[kept++] = waiting_[i];
      ++passed;
    }
  }
  if (kept != i) waiting_.erase(waiting_.begin() + kept, waiting_.begin() + i);
}

// Sums those pieces of an array that no other member has taken. All members have published it.
void InPlaceChannel::Sum(int array) {
  const Layout::Large& large = layout_.large[array];
  const size_t element = SizeOf(large.type);
  Memory memory;
  bool elsewhere = false;
  for (int member = 0; member < size_; ++member) {
    const uint64_t place =
        WordOf(*BoardOf(member), array).load(std::memory_order_acquire) & kPlaceMask;
    elsewhere |= place == kElsewhere;
    memory.push_back(place < kFirstPlace ? nullptr
                                         : group_->InArena(member, (place - kFirstPlace) * kUnit,
                                                           large.count * element));
    if (place >= kFirstPlace && memory.back() == nullptr) liar_ = member;
  }
  if (elsewhere) left_out_.push_back(array);
  if (elsewhere || liar_ >= 0) return;
  const int pieces =
      std::max(size_, static_cast<int>((large.count * element + kPiece - 1) / kPiece));
  std::atomic<uint64_t>& taken = TakenOf(array);
  // Where the group has ended, the pass will not be complete.
  while (group_->BeginTouch()) {
    const int piece = Take(taken, pieces);
    if (piece >= 0) SumPiece(memory, large.type, SliceOf(large.count, element, piece, pieces));
    group_->EndTouch();
    if (piece < 0) return;
  }
}

// Returns the first piece that nobody has taken in this pass, and takes it; -1: none is left.
int InPlaceChannel::Take(std::atomic<uint64_t>& taken, int pieces) const {
  uint64_t word = taken.load(std::memory_order_relaxed);
  while (true) {
    const int piece = IsOfPass(word, pass_) ? static_cast<int>(word & kPlaceMask) : 0;
    if (piece == pieces) return -1;
    if (taken.compare_exchange_weak(word, OfPass(pass_, static_cast<uint64_t>(piece) + 1),
                                    std::memory_order_relaxed)) {
      return piece;
    }
  }
}

void InPlaceChannel::SumPiece(const Memory& memory, ElementType type, const Slice& piece) const {
  if (piece.count == 0) return;
  absl::InlinedVector<const std::byte*, 16> inputs;
  absl::InlinedVector<std::byte*, 16> outputs;
  for (std::byte* const array : memory) {
    std::byte* const begin = array == nullptr ? nullptr : array + piece.begin * SizeOf(type);
    inputs.push_back(begin);
    if (begin != nullptr) outputs.push_back(begin);
  }
  ReduceTree(ReduceKind::kSum, type, inputs, outputs, piece.count, factor_);
}

void InPlaceChannel::Finish() {
  in_pass_ = true;
  Help(waiting_.size());
}

bool InPlaceChannel::AllBoardsFound() const {
  for (int member = 0; member < size_; ++member) {
    if (BoardOf(member) == nullptr) return false;
  }
  return true;
}

bool InPlaceChannel::AllArrived() const {
  for (int member = 0; member < size_; ++member) {
    const Board* const board = BoardOf(member);
    if (board == nullptr || board->arrivals.load(std::memory_order_acquire) < pass_) return false;
  }
  return true;
}

bool InPlaceChannel::MayAdvance() const {
  if (arrived_.load(std::memory_order_acquire)) return AllArrived();
  if (!AllBoardsFound()) return false;
  const int array = awaited_.load(std::memory_order_acquire);
  return array < 0 || AllPublished(array);
}

bool InPlaceChannel::Advance() {
  MutexLock lock(mutex_);
  if (!arrived_.load(std::memory_order_relaxed)) {
    Help(waiting_.size());
    awaited_.store(waiting_.empty() ? -1 : waiting_.front(), std::memory_order_release);
    // A member may hide its board as soon as all have arrived.
    if (liar_ >= 0) group_->Abort();
    if (!AllBoardsFound() || !waiting_.empty() || group_->ended()) return false;
    arrived_.store(true, std::memory_order_release);
    const_cast<Board*>(BoardOf(member_))->arrivals.store(pass_, std::memory_order_release);
    group_->NotifyIf([this] { return AllArrived(); });
  }
  if (!AllArrived()) return false;
  in_pass_ = false;
  std::sort(left_out_.begin(), left_out_.end());
  return true;
}

void InPlaceChannel::SumSmall(float* floats, double* doubles) {
  absl::InlinedVector<const std::byte*, 16> inputs;
  for (int member = 0; member < size_; ++member) inputs.push_back(SmallOf(member));
  auto* output = reinterpret_cast<std::byte*>(floats);
  if (layout_.small_floats > 0) {
    ReduceTree(ReduceKind::kSum, ElementType::kFloat, inputs, {&output, 1}, layout_.small_floats,
               factor_);
  }
  for (const std::byte*& input : inputs) input += doubles_at_;
  output = reinterpret_cast<std::byte*>(doubles);
  if (layout_.small_doubles > 0) {
    ReduceTree(ReduceKind::kSum, ElementType::kDouble, inputs, {&output, 1}, layout_.small_doubles,
               factor_);
  }
  const_cast<Board*>(BoardOf(member_))->finished.store(pass_, std::memory_order_release);
}

}  // namespace ddp::internal
