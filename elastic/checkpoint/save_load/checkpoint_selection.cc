#include "elastic/checkpoint/save_load/checkpoint_selection.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/format/strict_json.h"
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

// Returns the lines of all ranks, each once, in the order of first appearance. A line that not all
// ranks have begins with the ranks that have it.
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

// The ranks' findings about `top`, the newest checkpoint of all proposals.
struct Outlook {
  CheckpointId top;
  bool is_damaged = false;             // for some rank
  std::vector<std::string> obstacles;  // one line each, with the rank
  std::set<std::string> missing;       // files that some rank does not see
};

std::string ManifestPath(const std::string& folder, const CheckpointId& id) {
  return absl::StrCat(folder, "/", FolderName(id), "/MANIFEST.json");
}

std::optional<CheckpointId> NewestOf(const std::vector<Proposal>& proposals) {
  std::optional<CheckpointId> newest;
  for (const Proposal& proposal : proposals) {
    if (proposal.id.has_value()) newest = std::max(newest, proposal.id);
    if (proposal.obstacle.has_value()) newest = std::max(newest, proposal.obstacle->id);
  }
  return newest;
}

Outlook LookAt(const CheckpointId& top, const std::vector<Proposal>& proposals,
               const std::string& folder) {
  Outlook outlook{.top = top};
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    const Proposal& proposal = proposals[rank];
    const bool damaged =
        std::find(proposal.damaged.begin(), proposal.damaged.end(), top) != proposal.damaged.end();
    outlook.is_damaged |= damaged;
    if (damaged || proposal.id == top) continue;
    std::string file = ManifestPath(folder, top);
    std::string message = absl::StrCat(file, ": no such file");
    if (proposal.obstacle.has_value() && proposal.obstacle->id == top) {
      file = proposal.obstacle->file;
      message = proposal.obstacle->message;
    }  // else the rank does not see the checkpoint at all
    if (!file.empty()) outlook.missing.insert(file);
    outlook.obstacles.push_back(absl::StrCat("rank ", rank, ": ", message));
  }
  return outlook;
}

// Returns the first of the missing files that no rank sees. Empty when some rank sees each, or when
// not every rank has looked yet.
std::string MissingEverywhere(const Outlook& outlook, const std::vector<Proposal>& proposals) {
  for (const std::string& file : outlook.missing) {
    const bool everywhere =
        std::all_of(proposals.begin(), proposals.end(), [&file](const Proposal& proposal) {
          return std::find(proposal.absent.begin(), proposal.absent.end(), file) !=
                 proposal.absent.end();
        });
    if (everywhere) return file;
  }
  return "";
}

// Judges ranks that see no checkpoint while others do, or cannot list the folder. Returns kLoad
// when there are no such ranks.
Verdict JudgeFolders(const std::vector<Proposal>& proposals, const std::string& folder,
                     bool may_retry) {
  Verdict verdict;
  const std::vector<size_t> unlisted = RanksWhere(proposals, [](const Proposal& proposal) {
    return proposal.obstacle.has_value() && !proposal.obstacle->id.has_value();
  });
  const std::vector<size_t> blind =
      RanksWhere(proposals, [](const Proposal& proposal) { return proposal.listed == 0; });
  if (!unlisted.empty()) {
    verdict.reason =
        absl::StrCat("rank ", unlisted[0], ": ", proposals[unlisted[0]].obstacle->message);
  } else if (blind.size() == proposals.size()) {
    verdict.kind = Verdict::Kind::kEmpty;
    return verdict;
  } else if (!blind.empty()) {
    verdict.reason =
        absl::StrCat(RanksText(blind), " of ", proposals.size(), " see no checkpoint in ", folder,
                     ", others do: all ranks need the same folder");
  } else {
    verdict.kind = Verdict::Kind::kLoad;
    return verdict;
  }
  verdict.kind = may_retry ? Verdict::Kind::kRetry : Verdict::Kind::kFail;
  return verdict;
}

// Judges the newest checkpoint when not every rank can read it.
Verdict JudgeObstacles(const Outlook& outlook, const std::vector<Proposal>& proposals,
                       const std::string& folder, bool may_retry) {
  Verdict verdict;
  verdict.bound = outlook.top;
  const std::string gone = MissingEverywhere(outlook, proposals);
  if (outlook.is_damaged || !gone.empty()) {
    verdict.kind = Verdict::Kind::kTryOlder;
    if (!outlook.is_damaged) verdict.reason = absl::StrCat(gone, ": no rank sees such a file");
  } else if (may_retry) {
    verdict.kind = Verdict::Kind::kRetry;
    verdict.look_for.assign(outlook.missing.begin(), outlook.missing.end());
  } else {
    verdict.reason = absl::StrCat(
        folder, "/", FolderName(outlook.top),
        " cannot be read, and is not known to be damaged, so no older one was taken:\n  ",
        absl::StrJoin(outlook.obstacles, "\n  "));
  }
  return verdict;
}

json ToJson(const CheckpointId& id) { return {{"step", id.step}, {"generation", id.generation}}; }

// Returns a field of `object`. A field that is missing or of another type sets `status`; nothing is
// thrown.
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

Verdict SelectCheckpoint(const std::vector<Proposal>& proposals, const std::string& folder,
                         bool may_retry) {
  CHECK(!proposals.empty());
  Verdict verdict = JudgeFolders(proposals, folder, may_retry);
  if (verdict.kind != Verdict::Kind::kLoad) return verdict;

  const std::vector<std::string> passed_over = Merge(proposals, &Proposal::passed_over);
  const std::optional<CheckpointId> top = NewestOf(proposals);
  if (!top.has_value()) {
    verdict.kind = Verdict::Kind::kFail;
    verdict.is_damage = true;
    verdict.reason = absl::StrCat("none of the checkpoints in ", folder,
                                  " can be read; remove them to start anew, or mend them:\n  ",
                                  absl::StrJoin(passed_over, "\n  "));
    return verdict;
  }
  const Outlook outlook = LookAt(*top, proposals, folder);
  if (outlook.is_damaged || !outlook.obstacles.empty()) {
    return JudgeObstacles(outlook, proposals, folder, may_retry);
  }
  verdict.bound = *top;
  const bool same_manifest =
      std::all_of(proposals.begin(), proposals.end(),
                  [&](const Proposal& p) { return p.manifest_hash == proposals[0].manifest_hash; });
  if (!same_manifest) {
    verdict.kind = may_retry ? Verdict::Kind::kRetry : Verdict::Kind::kFail;
    verdict.read_again = true;
    verdict.reason = absl::StrCat(ManifestPath(folder, *top),
                                  ": the ranks see different manifests: all ranks need the same "
                                  "folder");
    return verdict;
  }
  const std::vector<std::string> mismatches = Merge(proposals, &Proposal::mismatches);
  if (mismatches.empty()) {
    verdict.passed_over = passed_over;
    return verdict;  // kLoad
  }
  verdict.kind = Verdict::Kind::kFail;
  verdict.does_not_fit = true;
  verdict.reason = absl::StrCat(folder, "/", FolderName(verdict.bound),
                                " is a checkpoint of another model or job; nothing was loaded:\n  ",
                                absl::StrJoin(mismatches, "\n  "));
  return verdict;
}

std::string EncodeProposal(const Proposal& proposal) {
  json damaged = json::array();
  for (const CheckpointId& id : proposal.damaged) damaged.push_back(ToJson(id));
  json object = {{"listed", proposal.listed},           {"manifest_hash", proposal.manifest_hash},
                 {"damaged", std::move(damaged)},       {"absent", proposal.absent},
                 {"passed_over", proposal.passed_over}, {"mismatches", proposal.mismatches}};
  if (proposal.id.has_value()) object["id"] = ToJson(*proposal.id);
  if (proposal.obstacle.has_value()) {
    object["obstacle"] = {{"file", proposal.obstacle->file},
                          {"message", proposal.obstacle->message}};
    if (proposal.obstacle->id.has_value()) {
      object["obstacle"]["id"] = ToJson(*proposal.obstacle->id);
    }
  }
  return Dump(object);
}

absl::StatusOr<Proposal> ParseProposal(const std::string& text) {
  DDP_ASSIGN_OR_RETURN(const json object, ParseStrictJson(text));
  absl::Status status;
  Proposal proposal;
  proposal.listed = static_cast<int64_t>(std::min<uint64_t>(
      Get<uint64_t>(object, "listed", &json::is_number_unsigned, status), INT64_MAX));
  proposal.manifest_hash = Get<std::string>(object, "manifest_hash", &json::is_string, status);
  for (const json& id : Get<json>(object, "damaged", &json::is_array, status)) {
    proposal.damaged.push_back(GetId(id, status));
  }
  proposal.absent = GetTexts(object, "absent", status);
  proposal.passed_over = GetTexts(object, "passed_over", status);
  proposal.mismatches = GetTexts(object, "mismatches", status);
  if (object.is_object() && object.contains("id")) proposal.id = GetId(object["id"], status);
  if (object.is_object() && object.contains("obstacle")) {
    const json& obstacle = object["obstacle"];
    proposal.obstacle.emplace();
    proposal.obstacle->file = Get<std::string>(obstacle, "file", &json::is_string, status);
    proposal.obstacle->message = Get<std::string>(obstacle, "message", &json::is_string, status);
    if (obstacle.is_object() && obstacle.contains("id")) {
      proposal.obstacle->id = GetId(obstacle["id"], status);
    }
  }
  DDP_RETURN_IF_ERROR(status);
  return proposal;
}

std::string EncodeVerdict(const Verdict& verdict) {
  return Dump({{"kind", static_cast<int>(verdict.kind)},
               {"bound", ToJson(verdict.bound)},
               {"does_not_fit", verdict.does_not_fit},
               {"is_damage", verdict.is_damage},
               {"reason", verdict.reason},
               {"look_for", verdict.look_for},
               {"read_again", verdict.read_again},
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
  verdict.does_not_fit = Get<bool>(object, "does_not_fit", &json::is_boolean, status);
  verdict.is_damage = Get<bool>(object, "is_damage", &json::is_boolean, status);
  verdict.reason = Get<std::string>(object, "reason", &json::is_string, status);
  verdict.read_again = Get<bool>(object, "read_again", &json::is_boolean, status);
  verdict.look_for = GetTexts(object, "look_for", status);
  verdict.passed_over = GetTexts(object, "passed_over", status);
  DDP_RETURN_IF_ERROR(status);
  return verdict;
}

}  // namespace ddp::elastic
