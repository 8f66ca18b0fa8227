#include "elastic/checkpoint/inspect/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/text/text_table.h"
#include "elastic/checkpoint/inspect/stored_checkpoint.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using Json = nlohmann::ordered_json;
using Fate = PruneDecision::Fate;

std::string Shown(std::string text) {
  for (char& byte : text) {
    if (byte < ' ' || byte > '~') byte = '?';  // negative from 0x80 on where char is signed
  }
  return text;
}

std::string Line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string Plural(uint64_t count, const std::string& one) {
  return absl::StrCat(count, " ", one, count == 1 ? "" : "s");
}

// Returns an age as "12 s", "12 min", "3.5 h" or "4.0 days".
std::string AgeText(int64_t seconds) {
  if (seconds < 0) return "in the future";
  if (seconds < 120) return absl::StrCat(seconds, " s");
  if (seconds < 7200) return absl::StrCat(seconds / 60, " min");
  const double hours = static_cast<double>(seconds) / 3600;
  if (hours < 48) return absl::StrFormat("%.1f h", hours);
  return absl::StrFormat("%.1f days", hours / 24);
}

std::string UtcText(int64_t unix_seconds) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromUnixSeconds(unix_seconds),
                          absl::UTCTimeZone());
}

std::string NumberText(double number) { return absl::StrFormat("%.6g", number); }

std::string OptionText(const OptimizerRecord::Option& option) {
  if (const auto* flag = std::get_if<bool>(&option)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<double>(&option)) return NumberText(*number);
  const auto& numbers = std::get<std::vector<double>>(option);
  std::vector<std::string> texts;
  for (const double number : numbers) texts.push_back(NumberText(number));
  return absl::StrCat("(", absl::StrJoin(texts, ", "), ")");
}

std::string SamplerText(const SamplerState& sampler) {
  return absl::StrCat("  sampler: epoch ", sampler.epoch, ", ", sampler.cursor, " of ",
                      sampler.dataset_size, " samples, global batches of ",
                      sampler.global_batch_size, ", seed ", sampler.seed, "\n");
}

std::string OptimizerText(const OptimizerRecord& optimizer) {
  std::string text = absl::StrCat("  optimizer: ", Shown(optimizer.type), "\n");
  for (size_t i = 0; i < optimizer.groups.size(); ++i) {
    const OptimizerRecord::Group& group = optimizer.groups[i];
    absl::StrAppend(&text, "    group ", i, ": ", Plural(group.parameters.size(), "parameter"));
    for (const auto& [name, option] : group.options) {
      absl::StrAppend(&text, ", ", Shown(name), " ", OptionText(option));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// A number that JSON does not have is a text there.
Json FiniteOrText(double number) {
  if (std::isnan(number)) return "nan";
  return std::isfinite(number) ? Json(number) : Json("inf");
}

std::string TypeText(const std::optional<TensorType>& type) {
  return type.has_value() ? TensorTypeText(*type) : "missing";
}

Json TypeJson(const std::optional<TensorType>& type) {
  if (!type.has_value()) return nullptr;
  return {{"dtype", DtypeName(type->dtype)}, {"shape", type->shape}};
}

const char* FateName(Fate fate, bool dry_run) {
  switch (fate) {
    case Fate::kKeep:
      return "kept";
    case Fate::kLeave:
      return "left alone";
    case Fate::kRemove:
      return dry_run ? "would be deleted" : "deleted";
  }
  return "";
}

}  // namespace

std::string BytesText(uint64_t bytes) {
  constexpr std::array kUnits = {"kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  for (; value >= 999.95 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string ListingTable(const std::string& root, const FolderListing& listing, int64_t now) {
  std::string text;
  if (listing.checkpoints.empty()) {
    text = absl::StrCat("No checkpoint is in ", Shown(root), ".\n");
  } else {
    TextTable table(
        {"STEP", "GENERATION", "RUN", "WORLD SIZE", "TENSORS", "BYTES", "AGE", "STATE"});
    for (const ListedCheckpoint& entry : listing.checkpoints) {
      const bool known = entry.world_size > 0;
      table.Add({absl::StrCat(entry.id.step), absl::StrCat(entry.id.generation),
                 known && !entry.run_id.empty() ? Shown(entry.run_id) : "-",
                 known ? absl::StrCat(entry.world_size) : "-",
                 known ? absl::StrCat(entry.tensors) : "-", known ? BytesText(entry.bytes) : "-",
                 known ? AgeText(now - entry.saved_unix_seconds) : "-", StateName(entry.state)});
    }
    text = table.Text();
  }
  for (const ListedCheckpoint& entry : listing.checkpoints) {
    if (entry.reason.empty()) continue;
    absl::StrAppend(&text, StateName(entry.state), ": ", Shown(entry.reason), "\n");
  }
  for (const std::string& name : listing.work_folders) {
    absl::StrAppend(&text, "unfinished: ", Shown(name), "\n");
  }
  return text;
}

std::string ListingJson(const std::string& root, const FolderListing& listing) {
  Json checkpoints = Json::array();
  for (const ListedCheckpoint& entry : listing.checkpoints) {
    Json json = {{"folder", entry.folder},
                 {"step", entry.id.step},
                 {"generation", entry.id.generation},
                 {"state", StateName(entry.state)},
                 {"reason", entry.reason}};
    if (entry.world_size > 0) {
      json.update({{"run_id", entry.run_id},
                   {"world_size", entry.world_size},
                   {"files", entry.files},
                   {"tensors", entry.tensors},
                   {"bytes", entry.bytes},
                   {"saved_unix_seconds", entry.saved_unix_seconds}});
    }
    checkpoints.push_back(std::move(json));
  }
  return Line({{"folder", root},
               {"checkpoints", std::move(checkpoints)},
               {"unfinished", listing.work_folders}});
}

std::string ManifestTable(const std::string& folder, const Manifest& manifest) {
  std::string text =
      absl::StrCat(Shown(folder), "\n  step ", manifest.id.step, " of epoch ", manifest.epoch,
                   ", generation ", manifest.id.generation, " of run \"", Shown(manifest.run_id),
                   "\"\n  saved ", UtcText(manifest.saved_unix_seconds), " by a job of world size ",
                   manifest.world_size, " with LibTorch ", Shown(manifest.torch_version), "\n");
  if (manifest.sampler.has_value()) absl::StrAppend(&text, SamplerText(*manifest.sampler));
  if (manifest.optimizer.has_value()) absl::StrAppend(&text, OptimizerText(*manifest.optimizer));
  for (const auto& [alias, name] : manifest.aliases) {
    absl::StrAppend(&text, "  tied: ", Shown(alias), " is ", Shown(name), "\n");
  }
  if (!manifest.bucket_layout.empty()) {
    absl::StrAppend(&text, "  gradient buckets: ", manifest.bucket_layout.size(), "\n");
  }
  absl::StrAppend(&text, "  state hash ", manifest.state_hash.Hex(), "; ",
                  Plural(manifest.tensors.size(), "tensor"), " in ",
                  Plural(manifest.files.size(), "file"), ", ", BytesText(BytesOf(manifest)),
                  "\n\n");
  TextTable table({"TENSOR", "DTYPE", "SHAPE", "BYTES", "FILE", "XXH3-128"});
  for (const TensorRecord& tensor : manifest.tensors) {
    table.Add({Shown(tensor.name), DtypeName(tensor.type.dtype), ShapeText(tensor.type.shape),
               BytesText(tensor.bytes), Shown(tensor.file), tensor.hash.Hex()});
  }
  return text + table.Text();
}

std::string ManifestJson(const std::string& folder, const Manifest& manifest) {
  return Line({{"folder", folder},
               {"bytes", BytesOf(manifest)},
               {"manifest", Json::parse(EncodeManifest(manifest))}});
}

std::string VerificationTable(const std::vector<Verification>& verifications) {
  std::string text;
  for (const Verification& verification : verifications) {
    const std::string read = absl::StrCat(Plural(verification.tensors, "tensor"), " in ",
                                          Plural(verification.files, "file"), ", ",
                                          BytesText(verification.bytes), " read");
    absl::StrAppend(
        &text, Shown(verification.folder), ": ",
        verification.is_whole() ? "undamaged" : Plural(verification.damages.size(), "damage"), " (",
        read, ")\n");
    for (const Damage& damage : verification.damages) {
      absl::StrAppend(&text, "  ", Shown(damage.file), ": ", Shown(damage.place),
                      damage.place.empty() ? "" : ": ", Shown(damage.message), "\n");
    }
  }
  return text;
}

std::string VerificationJson(const std::vector<Verification>& verifications) {
  Json checkpoints = Json::array();
  for (const Verification& verification : verifications) {
    Json damages = Json::array();
    for (const Damage& damage : verification.damages) {
      damages.push_back(
          {{"file", damage.file}, {"place", damage.place}, {"message", damage.message}});
    }
    checkpoints.push_back({{"folder", verification.folder},
                           {"undamaged", verification.is_whole()},
                           {"files", verification.files},
                           {"tensors", verification.tensors},
                           {"bytes_read", verification.bytes},
                           {"damages", std::move(damages)}});
  }
  return Line({{"checkpoints", std::move(checkpoints)}});
}

std::string DifferenceTable(const CheckpointDifference& difference) {
  std::string text = absl::StrCat("A: ", Shown(difference.a), "\nB: ", Shown(difference.b), "\n");
  if (difference.is_empty()) {
    absl::StrAppend(&text, "The states are equal: ", Plural(difference.equal_tensors, "tensor"),
                    ".\n");
    return text;
  }
  if (!difference.tensors.empty()) {
    TextTable table({"TENSOR", "PART", "IN A", "IN B", "DIFFERENT ELEMENTS", "LARGEST DIFFERENCE"});
    for (const TensorDifference& tensor : difference.tensors) {
      std::vector<std::string> row = {Shown(tensor.name), Shown(tensor.part), TypeText(tensor.a),
                                      TypeText(tensor.b)};
      if (tensor.compares_values()) {
        row.push_back(absl::StrCat(tensor.different, " of ", tensor.elements));
        row.push_back(tensor.largest.has_value() ? NumberText(*tensor.largest) : "-");
      }
      table.Add(std::move(row));
    }
    absl::StrAppend(&text, table.Text());
  }
  for (const FieldDifference& field : difference.fields) {
    absl::StrAppend(&text, "field ", Shown(field.field), ": ",
                    field.a.empty() ? "missing" : Shown(field.a), " in A, ",
                    field.b.empty() ? "missing" : Shown(field.b), " in B\n");
  }
  absl::StrAppend(&text, Plural(difference.tensors.size(), "tensor"), " and ",
                  Plural(difference.fields.size(), "field"), " differ, ",
                  Plural(difference.equal_tensors, "tensor"),
                  difference.equal_tensors == 1 ? " is" : " are", " equal.\n");
  return text;
}

std::string DifferenceJson(const CheckpointDifference& difference) {
  Json tensors = Json::array();
  for (const TensorDifference& tensor : difference.tensors) {
    Json json = {{"part", tensor.part},
                 {"name", tensor.name},
                 {"a", TypeJson(tensor.a)},
                 {"b", TypeJson(tensor.b)}};
    if (tensor.compares_values()) {
      json["elements"] = tensor.elements;
      json["different_elements"] = tensor.different;
      if (tensor.largest.has_value()) json["largest_difference"] = FiniteOrText(*tensor.largest);
    }
    tensors.push_back(std::move(json));
  }
  Json fields = Json::array();
  for (const FieldDifference& field : difference.fields) {
    fields.push_back({{"field", field.field},
                      {"a", field.a.empty() ? Json() : Json::parse(field.a)},
                      {"b", field.b.empty() ? Json() : Json::parse(field.b)}});
  }
  return Line({{"a", difference.a},
               {"b", difference.b},
               {"equal", difference.is_empty()},
               {"equal_tensors", difference.equal_tensors},
               {"tensors", std::move(tensors)},
               {"fields", std::move(fields)}});
}

std::string PruneTable(const PruneResult& result) {
  std::string text;
  uint64_t removed = 0;
  uint64_t bytes = 0;
  for (const PruneResult::Entry& entry : result.entries) {
    const std::string folder = Shown(entry.checkpoint.folder);
    if (!entry.removed.ok()) {
      absl::StrAppend(&text, folder, ": not deleted: ", Shown(std::string(entry.removed.message())),
                      "\n");
      continue;
    }
    absl::StrAppend(&text, folder, ": ", FateName(entry.decision.fate, result.dry_run));
    if (entry.decision.fate == Fate::kLeave) {
      absl::StrAppend(&text, ": ", Shown(entry.decision.reason));
    }
    absl::StrAppend(&text, "\n");
    if (entry.decision.fate != Fate::kRemove) continue;
    ++removed;
    bytes += entry.checkpoint.bytes;
  }
  absl::StrAppend(&text, Plural(removed, "checkpoint"),
                  result.dry_run ? " would be deleted, " : " deleted, ", BytesText(bytes), ".\n");
  return text;
}

std::string PruneJson(const PruneResult& result) {
  Json checkpoints = Json::array();
  for (const PruneResult::Entry& entry : result.entries) {
    const bool removes = entry.decision.fate == Fate::kRemove;
    Json json = {{"folder", entry.checkpoint.folder},
                 {"step", entry.checkpoint.id.step},
                 {"generation", entry.checkpoint.id.generation},
                 {"bytes", entry.checkpoint.bytes},
                 {"fate", removes                              ? "delete"
                          : entry.decision.fate == Fate::kKeep ? "keep"
                                                               : "leave"},
                 {"reason", entry.decision.reason}};
    if (removes) {
      json["deleted"] = !result.dry_run && entry.removed.ok();
      json["error"] = std::string(entry.removed.message());
    }
    checkpoints.push_back(std::move(json));
  }
  return Line({{"dry_run", result.dry_run}, {"checkpoints", std::move(checkpoints)}});
}

}  // namespace ddp::elastic
