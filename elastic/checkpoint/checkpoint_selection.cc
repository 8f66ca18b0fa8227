#include "elastic/checkpoint/checkpoint_selection.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/strict_json.h"
#include "glog/logging.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using nlohmann::json;

std::string RanksText(const std::vector<size_t>& ranks) {
  const std::vector<size_t> shown(ranks.begin(),
                                  ranks.begin() + std::min<ptrdiff_t>(8, std::ssize(ranks)));
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(shown, ", "),
                      shown.size() < ranks.size() ? ", ..." : "");
}

// Lines of all ranks, each once, in the order of their first appearance; with the ranks that say
// so where not all do.
std::vector<std::string> Merge(const std::vector<Proposal>& proposals,
                               std::vector<std::string> Proposal::*lines) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<size_t>> ranks;
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    for (const std::string& line : proposals[rank].*lines) {
      if (ranks[line].empty()) order.push_back(line);
      ranks[line].push_back(rank);
    }
  }
  for (std::string& line : order) {
    const std::vector<size_t>& who = ranks[line];
    if (who.size() < proposals.size()) line = absl::StrCat(RanksText(who), ": ", line);
  }
  return order;
}

template <typename Predicate>
std::vector<size_t> RanksWhere(const std::vector<Proposal>& proposals, Predicate predicate) {
  std::vector<size_t> ranks;
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (predicate(proposals[rank])) ranks.push_back(rank);
  }
  return ranks;
}

// At least one rank has nothing to propose.
Verdict WithoutProposal(const std::vector<Proposal>& proposals, const std::string& folder) {
  Verdict verdict;
  verdict.passed_over = Merge(proposals, &Proposal::passed_over);
  const std::vector<size_t> blind =
      RanksWhere(proposals, [](const Proposal& proposal) { return proposal.listed == 0; });
  if (blind.size() == proposals.size()) {
    verdict.kind = Verdict::Kind::kEmpty;
  } else if (!blind.empty()) {
    verdict.reason =
        absl::StrCat(RanksText(blind), " of ", proposals.size(), " see no checkpoint in ", folder,
                     ", others do: all ranks need the same folder");
  } else {
    verdict.reason =
        absl::StrCat("none of the checkpoints in ", folder,
                     " can be read; remove them to start anew, or mend them:\n  ",
                     verdict.passed_over.empty() ? "there is none that all ranks can read"
                                                 : absl::StrJoin(verdict.passed_over, "\n  "));
  }
  return verdict;
}

json ToJson(const CheckpointId& id) { return {{"step", id.step}, {"generation", id.generation}}; }

// These throw nothing: what is missing or of another type gives `status`.
template <typename T>
T Get(const json& object, const char* name, bool (json::*is)() const noexcept,
      absl::Status& status) {
  if (object.is_object() && object.contains(name) && (object[name].*is)()) {
    return object[name].get<T>();
  }
  status = absl::DataLossError(absl::StrCat("a rank has sent a message without \"", name, "\""));
  return {};
}

std::vector<std::string> GetTexts(const json& object, const char* name, absl::Status& status) {
  const json list = Get<json>(object, name, &json::is_array, status);
  std::vector<std::string> texts;
  for (const json& item : list) {
    if (!item.is_string()) {
      status = absl::DataLossError(absl::StrCat("\"", name, "\" has an entry that is no text"));
      break;
    }
    texts.push_back(item.get<std::string>());
  }
  return texts;
}

CheckpointId GetId(const json& object, absl::Status& status) {
  CheckpointId id;
  id.step = static_cast<int64_t>(std::min<uint64_t>(
      Get<uint64_t>(object, "step", &json::is_number_unsigned, status), INT64_MAX));
  id.generation = Get<uint64_t>(object, "generation", &json::is_number_unsigned, status);
  return id;
}

std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

Verdict SelectCheckpoint(const std::vector<Proposal>& proposals, const std::string& folder) {
  CHECK(!proposals.empty());
  const bool all_propose = std::all_of(proposals.begin(), proposals.end(),
                                       [](const Proposal& p) { return p.id.has_value(); });
  if (!all_propose) return WithoutProposal(proposals, folder);

  Verdict verdict;
  verdict.passed_over = Merge(proposals, &Proposal::passed_over);
  const auto lower = [](const Proposal& a, const Proposal& b) { return *a.id < *b.id; };
  verdict.bound = *std::min_element(proposals.begin(), proposals.end(), lower)->id;
  const bool same_id = std::all_of(proposals.begin(), proposals.end(),
                                   [&](const Proposal& p) { return *p.id == verdict.bound; });
  const bool same_manifest =
      std::all_of(proposals.begin(), proposals.end(),
                  [&](const Proposal& p) { return p.manifest_hash == proposals[0].manifest_hash; });
  if (!same_id || !same_manifest) {
    verdict.kind = Verdict::Kind::kTryOlder;
    verdict.bound_included = !same_id;
    verdict.reason =
        same_id ? absl::StrCat(FolderName(verdict.bound), ": the ranks see different manifests")
                : absl::StrCat("the newest checkpoint that every rank can read is at most ",
                               FolderName(verdict.bound));
    return verdict;
  }
  const std::vector<std::string> mismatches = Merge(proposals, &Proposal::mismatches);
  if (mismatches.empty()) {
    verdict.kind = Verdict::Kind::kLoad;
    return verdict;
  }
  verdict.does_not_fit = true;
  verdict.reason = absl::StrCat(folder, "/", FolderName(verdict.bound),
                                " is a checkpoint of another model or job; nothing was loaded:\n  ",
                                absl::StrJoin(mismatches, "\n  "));
  return verdict;
}

std::string EncodeProposal(const Proposal& proposal) {
  json object = {{"listed", proposal.listed},
                 {"manifest_hash", proposal.manifest_hash},
                 {"passed_over", proposal.passed_over},
                 {"mismatches", proposal.mismatches}};
  if (proposal.id.has_value()) object["id"] = ToJson(*proposal.id);
  return Dump(object);
}

absl::StatusOr<Proposal> ParseProposal(const std::string& text) {
  DDP_ASSIGN_OR_RETURN(const json object, ParseStrictJson(text));
  absl::Status status;
  Proposal proposal;
  proposal.listed = static_cast<int64_t>(std::min<uint64_t>(
      Get<uint64_t>(object, "listed", &json::is_number_unsigned, status), INT64_MAX));
  proposal.manifest_hash = Get<std::string>(object, "manifest_hash", &json::is_string, status);
  proposal.passed_over = GetTexts(object, "passed_over", status);
  proposal.mismatches = GetTexts(object, "mismatches", status);
  if (object.is_object() && object.contains("id")) proposal.id = GetId(object["id"], status);
  DDP_RETURN_IF_ERROR(status);
  return proposal;
}

std::string EncodeVerdict(const Verdict& verdict) {
  return Dump({{"kind", static_cast<int>(verdict.kind)},
               {"bound", ToJson(verdict.bound)},
               {"bound_included", verdict.bound_included},
               {"does_not_fit", verdict.does_not_fit},
               {"reason", verdict.reason},
               {"passed_over", verdict.passed_over}});
}

absl::StatusOr<Verdict> ParseVerdict(const std::string& text) {
  DDP_ASSIGN_OR_RETURN(const json object, ParseStrictJson(text));
  absl::Status status;
  Verdict verdict;
  const uint64_t kind = Get<uint64_t>(object, "kind", &json::is_number_unsigned, status);
  if (kind > static_cast<uint64_t>(Verdict::Kind::kFail)) {
    status = absl::DataLossError("a verdict of an unknown kind");
  }
  verdict.kind = static_cast<Verdict::Kind>(kind);
  verdict.bound = GetId(Get<json>(object, "bound", &json::is_object, status), status);
  verdict.bound_included = Get<bool>(object, "bound_included", &json::is_boolean, status);
  verdict.does_not_fit = Get<bool>(object, "does_not_fit", &json::is_boolean, status);
  verdict.reason = Get<std::string>(object, "reason", &json::is_string, status);
  verdict.passed_over = GetTexts(object, "passed_over", status);
  DDP_RETURN_IF_ERROR(status);
  return verdict;
}

}  // namespace ddp::elastic
