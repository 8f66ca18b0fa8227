#include "ddp/optim/peer_memory.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <utility>

namespace ddp::internal {
namespace {

// Of a write without a look at the end of the group: about 0.1 ms.
constexpr size_t kPiece = size_t{512} << 10;

// Shorter copies stay in the cache.
constexpr size_t kShortest = size_t{64} << 10;

// Copies past the cache: a plain store of a line that is not in the cache reads the line first.
// With parameters of 101 MB, the copy then takes 0.75 of the time.
void Copy(std::byte* to, const std::byte* from, size_t count) {
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  if (count >= kShortest) {
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
    std::memcpy(to, from, head);
    size_t at = head;
    for (; at + kLine <= count; at += kLine) {
      const auto* const source = reinterpret_cast<const __m128i_u*>(from + at);
      auto* const target = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(source);
      const __m128i b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2);
      const __m128i d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();  // such stores are not ordered before a later release
    std::memcpy(to + at, from + at, count - at);
    return;
  }
#endif
  std::memcpy(to, from, count);
}

}  // namespace

PeerMemory::PeerMemory(std::shared_ptr<HostGroup> group, int64_t mark)
    : group_(std::move(group)), own_mark_(FindMark(group_->member(), mark)) {
  if (own_mark_ != nullptr) own_mark_->store(0, std::memory_order_seq_cst);
}

std::atomic<uint64_t>* PeerMemory::FindMark(int member, int64_t place) const {
  if (place < 0 || place % sizeof(uint64_t) != 0) return nullptr;
  return reinterpret_cast<std::atomic<uint64_t>*>(
      group_->InArena(member, static_cast<uint64_t>(place), sizeof(uint64_t)));
}

void PeerMemory::Connect(const std::vector<Places>& places, const std::vector<int64_t>& bytes) {
  const int size = group_->size();
  reached_.assign(bytes.size(), places.size() == static_cast<size_t>(size));
  for (int member = 0; member < static_cast<int>(places.size()); ++member) {
    const Places& theirs = places[member];
    marks_.push_back(FindMark(member, theirs.mark));
    if (marks_.back() == nullptr) reached_.assign(bytes.size(), false);
    for (size_t i = 0; i < bytes.size(); ++i) {
      const int64_t place = i < theirs.parameters.size() ? theirs.parameters[i] : kElsewhere;
      std::byte* found = nullptr;
      if (place >= 0 && bytes[i] >= 0) {
        found = group_->InArena(member, static_cast<uint64_t>(place), bytes[i]);
      }
      memory_.push_back(found);
      if (found == nullptr) reached_[i] = false;
    }
  }
}

// The marks are in place before any value is.
void PeerMemory::Mark() {
  if (std::exchange(marked_, step_) == step_) return;
  for (int member = 0; member < group_->size(); ++member) {
    if (member != group_->member()) marks_[member]->store(step_, std::memory_order_seq_cst);
  }
}

bool PeerMemory::Write(int parameter, int64_t begin, std::span<const std::byte> values) {
  const int size = group_->size();
  for (size_t done = 0; done < values.size(); done += kPiece) {
    const auto piece = values.subspan(done, std::min(kPiece, values.size() - done));
    // Each member begins with another peer. The piece stays in the cache for all of them.
    for (int i = 1; i < size; ++i) {
      const int member = (group_->member() + i) % size;
      if (!group_->BeginTouch()) return false;
      Mark();
      Copy(At(member, parameter) + begin + done, piece.data(), piece.size());
      group_->EndTouch();
    }
  }
  return true;
}

bool PeerMemory::written() const {
  return own_mark_ != nullptr && own_mark_->load(std::memory_order_seq_cst) > complete_;
}

bool PeerMemory::Abandon(absl::Duration timeout) {
  group_->Abort();
  return group_->Quiesce(timeout);
}

}  // namespace ddp::internal
