#include "ddp/comm/check/mismatch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/common/name_list.h"
#include "ddp/common/rpc_place.h"

namespace ddp::internal {
namespace {

constexpr char kJoinExchange[] = "exchange of a Join";
constexpr char kBatchNorm[] = "of a SyncBatchNorm";
constexpr char kDifferentBatches[] =
    "the ranks ran different numbers of batches, or took different branches. Use ddp::Join for "
    "inputs of different length, or give every rank the same number of batches";

// "rank 3 is", "ranks 1, 3 are".
std::string RanksAre(const std::vector<int>& ranks) {
  return absl::StrCat(RankList(ranks), ranks.size() == 1 ? " is" : " are");
}

std::string Advice(const CollectiveRecord& a, const CollectiveRecord& b) {
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
  if (absl::StrContains(a.what, kChangeOfParameter) ||
      absl::StrContains(b.what, kChangeOfParameter)) {
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

std::string Differences(const CollectiveRecord& a, const CollectiveRecord& b) {
  std::vector<std::string> aspects;
  if (a.operation != b.operation) aspects.push_back("operation");
  if (a.dtype != b.dtype) aspects.push_back("dtype");
  if (a.shape != b.shape) aspects.push_back("shape");
  if (a.layout != b.layout) aspects.push_back("layout");
  if (a.device != b.device) aspects.push_back("device type");
  if (a.root != b.root) aspects.push_back("root");
  if (a.what != b.what) aspects.push_back("purpose");
  return absl::StrJoin(aspects, ", ");
}

// The different versions of a collective, each with its ranks, in the order of the lowest ranks.
using Versions = std::vector<std::pair<const CollectiveRecord*, std::vector<int>>>;

void Add(Versions& versions, int rank, const CollectiveRecord& record) {
  // What has a fingerprint may differ in its text: ranks that have changed a parameter differently
  // are in the same comparison.
  const auto same = std::find_if(versions.begin(), versions.end(), [&](const auto& version) {
    const CollectiveRecord& other = *version.first;
    return record.fingerprint != 0 ? other.fingerprint == record.fingerprint : other == record;
  });
  if (same != versions.end()) {
    same->second.push_back(rank);
  } else {
    versions.push_back({&record, {rank}});
  }
}

Versions VersionsOf(const std::map<int, RankPosition>& positions, int64_t sequence) {
  Versions versions;
  for (const auto& [rank, position] : positions) {
    if (position.newest.empty()) continue;
    const int64_t index = sequence - position.newest.front().sequence;
    if (index < 0 || index >= static_cast<int64_t>(position.newest.size())) continue;
    Add(versions, rank, position.newest[index]);
  }
  return versions;
}

// Describes the ranks that will not launch `awaited`, because they wait in a meeting of the workers
// of remote calls that the asker has not come to.
std::string DescribeMeeting(const std::map<int, RankPosition>& positions, int asker,
                            int64_t awaited) {
  const auto own = positions.find(asker);
  const Versions versions = VersionsOf(positions, awaited);
  if (own == positions.end() || versions.empty()) return std::string();
  std::map<RpcPlace::Meeting, std::vector<int>> in_meeting;
  for (const auto& [rank, position] : positions) {
    const RpcPlace& rpc = position.rpc;
    if (position.launched <= awaited && rpc.waits_in != RpcPlace::Meeting::kNone &&
        rpc.world == own->second.rpc.world && rpc.meetings > own->second.rpc.meetings) {
      in_meeting[rpc.waits_in].push_back(rank);
    }
  }
  if (in_meeting.empty()) return std::string();
  std::string text =
      absl::StrCat("the ranks are in different places: ", RanksAre({asker}), " in collective ",
                   awaited, ", ", versions.front().first->Describe());
  for (const auto& [meeting, ranks] : in_meeting) {
    const char* name = meeting == RpcPlace::Meeting::kBarrier ? "barrier()" : "shutdown()";
    absl::StrAppend(&text, "; ", RanksAre(ranks), " in rpc::Workers::", name);
  }
  absl::StrAppend(&text, ": ", kDifferentBatches);
  return text;
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
  return DescribeMeeting(positions, asker, awaited);
}

std::string DescribeDifference(int64_t sequence, const std::vector<CollectiveRecord>& records) {
  Versions versions;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    Add(versions, static_cast<int>(rank), records[rank]);
  }
  if (versions.size() <= 1) return std::string();
  const auto most = std::max_element(
      versions.begin(), versions.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  const auto run = [](const auto& version) {
    return absl::StrCat(RankList(version.second), version.second.size() == 1 ? " runs " : " run ",
                        version.first->DescribeTensor());
  };
  std::string text = absl::StrCat("Detected mismatch between collectives on ranks: as collective ",
                                  sequence, ", ", run(*most));
  for (const auto& version : versions) {
    if (&version == &*most) continue;
    absl::StrAppend(&text, "; but ", run(version), ": they differ in ",
                    Differences(*most->first, *version.first));
  }
  absl::StrAppend(&text, ". All ranks must call the same collectives in the same order");
  return text;
}

}  // namespace ddp::internal
