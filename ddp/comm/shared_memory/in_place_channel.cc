#include "ddp/comm/shared_memory/in_place_channel.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace ddp::internal {
namespace {

// How many arrays that not all members have published a look passes over. Members' orders differ
// little, so an array that is ready is near the front.
constexpr size_t kLookAhead = 16;

// The longest part of an array that one member sums at a time, without a look at the end of the
// group.
constexpr size_t kPiece = size_t{256} << 10;
// The shortest part, when there are more members than parts of kPiece.
constexpr size_t kSmallestPiece = size_t{4} << 10;

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

template <typename Block>
size_t BytesOfMarks(int members) {
  return RoundUp(sizeof(Block) + static_cast<size_t>(members));
}

// The blocks of destroyed channels, as long as other members may read them. Thread-safe.
class RetiredBlocks {
 public:
  static RetiredBlocks& OfProcess() {
    static RetiredBlocks& blocks = *new RetiredBlocks();
    return blocks;
  }

  void Add(std::shared_ptr<std::byte> block, std::function<bool()> unread) {
    {
      MutexLock lock(mutex_);
      blocks_.emplace_back(std::move(block), std::move(unread));
    }
    Free();
  }

  // Frees the blocks that nobody reads any more.
  void Free() {
    MutexLock lock(mutex_);
    std::erase_if(blocks_, [](const auto& block) { return block.second(); });
  }

 private:
  Mutex mutex_;
  std::vector<std::pair<std::shared_ptr<std::byte>, std::function<bool()>>> blocks_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace

// The beginning of a block. The marks of the members follow, and two words for each large array:
// the words of the places, then those that count the pieces. Then come two halves of packed arrays,
// which take turns pass by pass.
struct InPlaceChannel::Block {
  std::atomic<uint64_t> arrivals;  // in member 0's block: of all members, at the ends of passes
  uint64_t large = 0;              // number of words
  uint64_t small_bytes = 0;        // of one half

  // The mark of a member: 1 when the member does not read this block any more.
  std::atomic<uint8_t>& mark(int member) {
    return reinterpret_cast<std::atomic<uint8_t>*>(this + 1)[member];
  }
};

absl::StatusOr<std::unique_ptr<InPlaceChannel>> InPlaceChannel::Make(
    std::shared_ptr<HostGroup> group, Layout layout) {
  const size_t small =
      RoundUp(layout.small_floats * sizeof(float)) + RoundUp(layout.small_doubles * sizeof(double));
  // An odd number: no gradient has that size, so none takes the block.
  const size_t bytes =
      std::max(Arena::kSmallestBlock, BytesOfMarks<Block>(group->size()) +
                                          2 * BytesOfWords(layout.large.size()) + 2 * small) |
      1;
  RetiredBlocks::OfProcess().Free();
  auto block = Arena::OfProcess().AllocateAlone(bytes);
  if (!block.ok()) return block.status();
  std::memset(block->get(), 0, bytes);
  return std::unique_ptr<InPlaceChannel>(
      new InPlaceChannel(std::move(group), std::move(layout), *std::move(block)));
}

InPlaceChannel::InPlaceChannel(std::shared_ptr<HostGroup> group, Layout layout,
                               std::shared_ptr<std::byte> block)
    : group_(std::move(group)),
      member_(group_->member()),
      size_(group_->size()),
      layout_(std::move(layout)),
      block_(std::move(block)),
      words_at_(BytesOfMarks<Block>(size_)),
      small_at_(words_at_ + 2 * BytesOfWords(layout_.large.size())),
      doubles_at_(RoundUp(layout_.small_floats * sizeof(float))),
      small_bytes_(doubles_at_ + RoundUp(layout_.small_doubles * sizeof(double))),
      blocks_(size_) {
  blocks_[member_] = new (block_.get()) Block{};
  blocks_[member_]->large = layout_.large.size();
  blocks_[member_]->small_bytes = small_bytes_;
  waiting_.reserve(layout_.large.size());
  left_out_.reserve(layout_.large.size());
}

int64_t InPlaceChannel::place() const {
  return reinterpret_cast<std::byte*>(blocks_[member_]) - Arena::OfProcess().base();
}

absl::Status InPlaceChannel::Connect(std::span<const int64_t> places) {
  for (int member = 0; member < size_; ++member) {
    if (member == member_) continue;
    auto* const block = reinterpret_cast<Block*>(group_->InArena(
        member, static_cast<uint64_t>(places[member]), small_at_ + 2 * small_bytes_));
    if (block == nullptr || block->large != layout_.large.size() ||
        block->small_bytes != small_bytes_) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", member, " of the host has gradients of other sizes than rank ",
                       member_, ", or no place for them"));
    }
    blocks_[member] = block;
  }
  return absl::OkStatus();
}

InPlaceChannel::~InPlaceChannel() {
  if (group_->in_forked_child()) return;  // the block is the parent's
  (void)Abandon();
  // Others read this member's block until they have marked it or are gone.
  std::vector<std::pair<std::atomic<uint8_t>*, std::function<bool()>>> readers;
  for (int member = 0; member < size_; ++member) {
    if (member == member_ || blocks_[member] == nullptr) continue;
    blocks_[member]->mark(member_).store(1, std::memory_order_release);
    readers.emplace_back(&blocks_[member_]->mark(member), group_->GoneTest(member));
  }
  RetiredBlocks::OfProcess().Add(block_, [readers = std::move(readers)] {
    return std::all_of(readers.begin(), readers.end(), [](const auto& reader) {
      return reader.first->load(std::memory_order_acquire) != 0 || reader.second();
    });
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

// ---- Blocks.

std::atomic<uint64_t>& InPlaceChannel::WordOf(int member, int array) const {
  std::byte* const words = reinterpret_cast<std::byte*>(blocks_[member]) + words_at_;
  return reinterpret_cast<std::atomic<uint64_t>*>(words)[array];
}

// The members count the pieces of an array in one block, and of all arrays in all blocks in turn.
std::atomic<uint64_t>& InPlaceChannel::TakenOf(int array) const {
  return (&WordOf(array % size_, array))[BytesOfWords(layout_.large.size()) / sizeof(uint64_t)];
}

std::byte* InPlaceChannel::SmallOf(int member) const {
  return reinterpret_cast<std::byte*>(blocks_[member]) + small_at_ + (pass_ % 2) * small_bytes_;
}

// ---- A pass.

void InPlaceChannel::Begin(double factor) {
  pass_.fetch_add(1, std::memory_order_relaxed);
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
  WordOf(member_, array).store(OfPass(pass_, word), std::memory_order_release);
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
    if (!IsOfPass(WordOf(member, array).load(std::memory_order_acquire), pass_)) return false;
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
  bool impossible = false;
  for (int member = 0; member < size_; ++member) {
    const uint64_t place = WordOf(member, array).load(std::memory_order_acquire) & kPlaceMask;
    elsewhere |= place == kElsewhere;
    memory.push_back(place < kFirstPlace ? nullptr
                                         : group_->InArena(member, (place - kFirstPlace) * kUnit,
                                                           large.count * element));
    impossible |= place >= kFirstPlace && memory.back() == nullptr;
  }
  if (elsewhere) left_out_.push_back(array);
  if (impossible) group_->Abort();
  if (elsewhere || impossible) return;
  const size_t bytes = large.count * element;
  const auto pieces = static_cast<int>(
      std::max((bytes + kPiece - 1) / kPiece, std::min<size_t>(size_, bytes / kSmallestPiece)));
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
  awaited_.store(waiting_.empty() ? -1 : waiting_.front(), std::memory_order_release);
}

bool InPlaceChannel::MayAdvance() const {
  if (arrived_.load(std::memory_order_acquire)) return AllArrived();
  const int array = awaited_.load(std::memory_order_acquire);
  return array < 0 || AllPublished(array);
}

bool InPlaceChannel::AllArrived() const {
  return blocks_[0]->arrivals.load(std::memory_order_acquire) >= pass_ * size_;
}

bool InPlaceChannel::Advance() {
  MutexLock lock(mutex_);
  if (!arrived_.load(std::memory_order_relaxed)) {
    // This is called often. So it looks at one array, until all have published it.
    if (!waiting_.empty() && !AllPublished(waiting_.front())) return false;
    Help(waiting_.size());
    awaited_.store(waiting_.empty() ? -1 : waiting_.front(), std::memory_order_release);
    if (!waiting_.empty() || group_->ended()) return false;
    arrived_.store(true, std::memory_order_release);
    blocks_[0]->arrivals.fetch_add(1, std::memory_order_acq_rel);
    group_->NotifyIf([this] { return AllArrived(); });
  }
  if (!AllArrived()) return false;
  in_pass_ = false;
  std::sort(left_out_.begin(), left_out_.end());
  return true;
}

void InPlaceChannel::SumSmall(float* floats, double* doubles) {
  const auto sum = [this](ElementType type, size_t at, size_t count, void* sums) {
    if (count == 0) return;
    absl::InlinedVector<const std::byte*, 16> inputs;
    for (int member = 0; member < size_; ++member) inputs.push_back(SmallOf(member) + at);
    auto* const output = static_cast<std::byte*>(sums);
    ReduceTree(ReduceKind::kSum, type, inputs, {&output, 1}, count, factor_);
  };
  sum(ElementType::kFloat, 0, layout_.small_floats, floats);
  sum(ElementType::kDouble, doubles_at_, layout_.small_doubles, doubles);
}

}  // namespace ddp::internal
