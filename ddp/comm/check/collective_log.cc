#include "ddp/comm/check/collective_log.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <xxhash.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/common/rpc_place.h"

namespace ddp::internal {
namespace {

constexpr size_t kFirstCapacity = 64;  // a power of two
constexpr int kSequenceBits = 12;

// Number of collectives that a position shows, from the oldest one that is not complete on.
constexpr int64_t kShown = 64;
// Number of complete collectives that a position shows before those.
constexpr int64_t kShownComplete = 8;

constexpr char kJoinExchange[] = "exchange of a Join";
constexpr char kBatchNorm[] = "of a SyncBatchNorm";
constexpr char kChange[] = " after a change of parameter";

uint64_t Fingerprint(const CollectiveCall& call, int64_t sequence) {
  // Ranks that have changed a parameter differently are in the same comparison.
  const std::string_view text = call.what.text().substr(0, call.what.text().find(kChange));
  const std::array<int64_t, 6> numbers = {sequence,  call.elements, call.bytes,
                                          call.root, call.sparse,   call.what.index()};
  uint64_t hash = XXH3_64bits(numbers.data(), sizeof(numbers));
  hash = XXH3_64bits_withSeed(call.operation, std::strlen(call.operation), hash);
  hash = XXH3_64bits_withSeed(call.dtype, std::strlen(call.dtype), hash);
  return XXH3_64bits_withSeed(text.data(), text.size(), hash);
}

// "rank 3 is", "ranks 1, 3 are".
std::string RanksAre(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "),
                      ranks.size() == 1 ? " is" : " are");
}

std::string Advice(const RankPosition::Launched& a, const RankPosition::Launched& b) {
  const bool a_joins = absl::StrContains(a.what, kJoinExchange);
  const bool b_joins = absl::StrContains(b.what, kJoinExchange);
  if (a_joins != b_joins) {
    return "only some ranks are under a ddp::Join that is enabled. Give every rank the same Join "
           "with the same JoinOptions (enable among them), and list every model and "
           "ZeroRedundancyOptimizer of the step in it";
  }
  const bool a_normalizes = absl::StrContains(a.what, kBatchNorm);
  const bool b_normalizes = absl::StrContains(b.what, kBatchNorm);
  if (a_normalizes != b_normalizes) {
    return "only some ranks are in a SyncBatchNorm. Convert the model on every rank, call train() "
           "and eval() on every rank alike, run every forward in train() on every rank, and the "
           "same number of batches";
  }
  if (absl::StrContains(a.what, kChange) || absl::StrContains(b.what, kChange)) {
    return "the program changed a parameter of the model on some ranks only, or differently. Give "
           "every rank the same type, shape and strides before the same forward";
  }
  if (a.operation == b.operation && a.what == b.what) {
    return "the ranks run the same collective on tensors of different size, type or layout. Give "
           "every rank the same tensors, model and comm hooks";
  }
  return "the ranks ran different numbers of batches, took different branches, or have different "
         "comm hooks. Use ddp::Join for inputs of different length, or give every rank the same "
         "number of batches";
}

}  // namespace

// ---- CollectiveLog

CollectiveLog::CollectiveLog() : entries_(kFirstCapacity) {}

uint32_t CollectiveLog::Add(CollectiveCall call) {
  MutexLock lock(mutex_);
  const int64_t sequence = launched_++;
  launcher_ = std::this_thread::get_id();
  if (sequence - complete_before_ >= static_cast<int64_t>(entries_.size())) Grow();
  oldest_ = std::max(oldest_, sequence + 1 - static_cast<int64_t>(entries_.size()));
  Entry& entry = entries_[sequence & (entries_.size() - 1)];
  entry.fingerprint = Fingerprint(call, sequence);
  entry.call = std::move(call);
  constexpr uint32_t kMask = (1U << kSequenceBits) - 1;
  return (static_cast<uint32_t>(entry.fingerprint) & ~kMask) |
         (static_cast<uint32_t>(sequence) & kMask);
}

void CollectiveLog::Grow() {
  std::vector<Entry> larger(entries_.size() * 2);
  const int64_t size = static_cast<int64_t>(entries_.size());
  for (int64_t sequence = oldest_; sequence < launched_ - 1; ++sequence) {
    larger[sequence & (2 * size - 1)] = std::move(entries_[sequence & (size - 1)]);
  }
  entries_ = std::move(larger);
}

void CollectiveLog::SetCompleteBefore(int64_t sequence) {
  MutexLock lock(mutex_);
  complete_before_ = sequence;
}

void CollectiveLog::EnterBarrier() {
  MutexLock lock(mutex_);
  ++barriers_;
  in_barrier_ = true;
}

void CollectiveLog::LeaveBarrier() {
  MutexLock lock(mutex_);
  in_barrier_ = false;
}

int64_t CollectiveLog::launched() const {
  MutexLock lock(mutex_);
  return launched_;
}

RankPosition CollectiveLog::Position() const {
  MutexLock lock(mutex_);
  // The launcher cannot add a collective meanwhile.
  RankPosition position{.launched = launched_,
                        .barriers = barriers_,
                        .in_barrier = in_barrier_,
                        .rpc = OwnRpcPlace::Of(launcher_)};
  const int64_t first = std::max(oldest_, complete_before_ - kShownComplete);
  const int64_t end = std::min(launched_, complete_before_ + kShown);
  for (int64_t sequence = first; sequence < end; ++sequence) {
    const Entry& entry = entries_[sequence & (entries_.size() - 1)];
    position.newest.push_back({.sequence = sequence,
                               .fingerprint = entry.fingerprint,
                               .operation = entry.call.operation,
                               .dtype = entry.call.dtype,
                               .bytes = entry.call.bytes,
                               .what = entry.call.what.ToString()});
  }
  return position;
}

// ---- Comparison

namespace {

using Versions = std::vector<std::pair<const RankPosition::Launched*, std::vector<int>>>;

// Groups the ranks by their version of collective `sequence`, in the order of the lowest ranks.
Versions VersionsOf(const std::map<int, RankPosition>& positions, int64_t sequence) {
  Versions versions;
  for (const auto& [rank, position] : positions) {
    if (position.newest.empty()) continue;
    const int64_t index = sequence - position.newest.front().sequence;
    if (index < 0 || index >= static_cast<int64_t>(position.newest.size())) continue;
    const RankPosition::Launched& mine = position.newest[index];
    const auto same = std::find_if(versions.begin(), versions.end(), [&](const auto& version) {
      return version.first->fingerprint == mine.fingerprint;
    });
    if (same != versions.end()) {
      same->second.push_back(rank);
    } else {
      versions.push_back({&mine, {rank}});
    }
  }
  return versions;
}

// Describes the ranks that will not launch `awaited`: `places`, of a few ranks. Returns an empty
// text when nothing is known of `awaited`.
std::string DescribePlaces(const std::map<int, RankPosition>& positions, int asker, int64_t awaited,
                           const std::vector<std::string>& places) {
  const Versions versions = VersionsOf(positions, awaited);
  if (places.empty() || versions.empty()) return std::string();
  return absl::StrCat("the ranks are in different places: ", RanksAre({asker}), " in collective ",
                      awaited, ", ", versions.front().first->Describe(), "; ",
                      absl::StrJoin(places, "; "),
                      ": the ranks ran different numbers of batches, or took different branches. "
                      "Use ddp::Join for inputs of different length, or give every rank the same "
                      "number of batches");
}

std::string DescribeBarrier(const std::map<int, RankPosition>& positions, int asker,
                            int64_t awaited) {
  const auto own = positions.find(asker);
  if (own == positions.end()) return std::string();
  std::vector<int> in_barrier;
  std::map<RpcPlace::Meeting, std::vector<int>> in_meeting;
  for (const auto& [rank, position] : positions) {
    if (position.launched > awaited) continue;
    if (position.in_barrier && position.barriers > own->second.barriers) in_barrier.push_back(rank);
    const RpcPlace& rpc = position.rpc;
    if (rpc.waits_in != RpcPlace::Meeting::kNone && rpc.world == own->second.rpc.world &&
        rpc.meetings > own->second.rpc.meetings) {
      in_meeting[rpc.waits_in].push_back(rank);
    }
  }
  std::vector<std::string> places;
  if (!in_barrier.empty()) {
    places.push_back(absl::StrCat(RanksAre(in_barrier), " in a monitored barrier"));
  }
  for (const auto& [meeting, ranks] : in_meeting) {
    const char* name = meeting == RpcPlace::Meeting::kBarrier ? "barrier()" : "shutdown()";
    places.push_back(absl::StrCat(RanksAre(ranks), " in rpc::Workers::", name));
  }
  return DescribePlaces(positions, asker, awaited, places);
}

}  // namespace

std::string DescribeMismatch(const std::map<int, RankPosition>& positions, int asker,
                             int64_t awaited) {
  int64_t first = -1;
  int64_t end = 0;
  for (const auto& [rank, position] : positions) {
    if (position.newest.empty()) continue;
    const int64_t begin = position.newest.front().sequence;
    first = first < 0 ? begin : std::min(first, begin);
    end = std::max(end, position.newest.back().sequence + 1);
  }
  for (int64_t sequence = std::max<int64_t>(first, 0); sequence < end; ++sequence) {
    const Versions versions = VersionsOf(positions, sequence);
    if (versions.size() < 2) continue;
    std::vector<std::string> parts;
    for (const auto& [call, ranks] : versions) {
      parts.push_back(
          absl::StrCat(RanksAre(ranks), " in collective ", sequence, ", ", call->Describe()));
    }
    return absl::StrCat("the ranks are in different collectives: ", absl::StrJoin(parts, "; "),
                        ": ", Advice(*versions[0].first, *versions[1].first));
  }
  return DescribeBarrier(positions, asker, awaited);
}

}  // namespace ddp::internal
