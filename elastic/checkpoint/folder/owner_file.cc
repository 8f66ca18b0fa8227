#include "elastic/checkpoint/folder/owner_file.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/file_system/whole_file.h"
#include "elastic/checkpoint/folder/work_folder.h"
#include "elastic/checkpoint/format/strict_json.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using nlohmann::json;

constexpr char kOwnerName[] = ".owner";
constexpr char kNumberPrefix[] = ".owner.";
constexpr char kTextPrefix[] = ".owner-";
constexpr uint64_t kBytesMax = 64 << 10;
constexpr uint64_t kNumberMax = 999'999'999'999;  // twelve digits, as in the file names
// A bound. A try fails only when another writer made progress, so few tries are needed.
constexpr int kTriesMax = 100;

std::string UnsettledName(int64_t number) {
  return absl::StrFormat("%s%012d", kNumberPrefix, number);
}

std::optional<int64_t> ParseUnsettledName(const std::string& name) {
  if (!absl::StartsWith(name, kNumberPrefix)) return std::nullopt;
  int64_t number = 0;
  if (!absl::SimpleAtoi(name.substr(sizeof(kNumberPrefix) - 1), &number)) return std::nullopt;
  if (number < 1 || UnsettledName(number) != name) return std::nullopt;
  return number;
}

std::string ClaimText(const OwnerFile::Claim& claim) {
  json object = {{"claim", claim.number},
                 {"generation", claim.owner.generation},
                 {"generation_nonce", claim.owner.nonce},
                 {"run_id", claim.owner.run_id}};
  if (claim.owner.instance > 0) object["instance"] = claim.owner.instance;
  if (!claim.owner.job.empty()) object["job"] = claim.owner.job;
  return object.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

template <typename T>
T Get(const json& object, const char* name, bool (json::*is)() const noexcept) {
  if (object.is_object() && object.contains(name) && (object[name].*is)()) {
    return object[name].get<T>();
  }
  return {};
}

// Returns the claim in `text`; claim 0 without an owner when the text is unreadable.
OwnerFile::Claim ParseClaim(const std::string& text) {
  OwnerFile::Claim claim;
  const absl::StatusOr<json> object = ParseStrictJson(text);
  if (!object.ok()) return claim;
  const auto number = Get<uint64_t>(*object, "claim", &json::is_number_unsigned);
  if (number <= kNumberMax) claim.number = static_cast<int64_t>(number);
  claim.owner.generation = Get<uint64_t>(*object, "generation", &json::is_number_unsigned);
  claim.owner.nonce = Get<std::string>(*object, "generation_nonce", &json::is_string);
  claim.owner.run_id = Get<std::string>(*object, "run_id", &json::is_string);
  claim.owner.instance = Get<int64_t>(*object, "instance", &json::is_number_unsigned);
  claim.owner.job = Get<std::string>(*object, "job", &json::is_string);
  return claim;
}

}  // namespace

bool IsClaimText(const std::string& name) {
  return absl::StartsWith(name, kTextPrefix) && IsPlainNonce(name.substr(sizeof(kTextPrefix) - 1));
}

OwnerFile::OwnerFile(FileSystem* file_system, std::string root)
    : file_system_(file_system), root_(std::move(root)) {}

std::string OwnerFile::Path(const std::string& name) const {
  return absl::StrCat(root_, "/", name);
}

absl::StatusOr<OwnerFile::Claim> OwnerFile::Read(const std::string& name) const {
  DDP_ASSIGN_OR_RETURN(const EntryKind kind, file_system_->KindOf(Path(name)));
  if (kind != EntryKind::kFile) {
    return absl::FailedPreconditionError(absl::StrCat(
        Path(name),
        " is not a plain file: remove it, so that the owner of the folder can be told"));
  }
  const absl::StatusOr<std::string> text = ReadWholeFile(*file_system_, Path(name), kBytesMax);
  if (absl::IsDataLoss(text.status())) return Claim();
  DDP_RETURN_IF_ERROR(text.status());
  return ParseClaim(*text);
}

absl::StatusOr<OwnerFile::Claim> OwnerFile::Current() const {
  for (int tries = 0; tries < kTriesMax; ++tries) {
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_->ListDirectory(root_));
    std::optional<Claim> highest;
    bool moved = false;
    for (const std::string& name : names) {
      const std::optional<int64_t> number = ParseUnsettledName(name);
      if (!number.has_value() || (highest.has_value() && highest->number > *number)) continue;
      absl::StatusOr<Claim> claim = Read(name);
      moved |= absl::IsNotFound(claim.status());  // settled or removed since: list again
      if (moved) break;
      if (absl::IsFailedPrecondition(claim.status())) continue;
      DDP_RETURN_IF_ERROR(claim.status());
      claim->number = *number;
      highest = *std::move(claim);
    }
    if (moved) continue;
    // Read after the unsettled claims: a claim that was settled in between is seen here.
    absl::StatusOr<Claim> settled = Read(kOwnerName);
    if (!settled.ok() && !absl::IsNotFound(settled.status())) return settled.status();
    if (settled.ok() && (!highest.has_value() || settled->number >= highest->number)) {
      return settled;
    }
    if (highest.has_value()) return *std::move(highest);
    return absl::NotFoundError(absl::StrCat(root_, " has no owner"));
  }
  return absl::UnavailableError(absl::StrCat("the owner of ", root_, " changes all the time"));
}

absl::StatusOr<OwnerFile::Claim> OwnerFile::Take(const CheckpointOwner& owner) {
  const std::string text_name = absl::StrCat(kTextPrefix, owner.nonce);
  for (int tries = 0; tries < kTriesMax; ++tries) {
    const absl::StatusOr<Claim> current = Current();
    if (!current.ok() && !absl::IsNotFound(current.status())) return current.status();
    Claim claim{.number = 1, .owner = owner};
    if (current.ok()) {
      if (current->owner.IsSame(owner) && current->number > 0) {
        // An earlier try of this owner may have failed before it settled the claim.
        DDP_ASSIGN_OR_RETURN(const Outcome outcome, SettleOwn(*current));
        if (outcome == Outcome::kSettled) return current;
        continue;
      }
      const absl::Status allowed = MayFollow(owner, current->owner);
      if (!allowed.ok()) {
        return absl::Status(allowed.code(), absl::StrCat(root_, ": ", allowed.message()));
      }
      claim.number = current->number + 1;
    }
    DDP_RETURN_IF_ERROR(Remove(text_name));
    DDP_RETURN_IF_ERROR(WriteWholeFile(*file_system_, Path(text_name), ClaimText(claim)));
    const absl::Status put =
        file_system_->Rename(Path(text_name), Path(UnsettledName(claim.number)));
    if (!put.ok()) DDP_RETURN_IF_ERROR(Remove(text_name));
    // kNotFound: another writer's claim came first, and that writer removed the text as a leftover.
    if (absl::IsAlreadyExists(put) || absl::IsNotFound(put)) continue;
    DDP_RETURN_IF_ERROR(put);
    DDP_ASSIGN_OR_RETURN(const Outcome outcome, Settle(claim));
    if (outcome == Outcome::kSettled) return claim;
  }
  return absl::UnavailableError(absl::StrCat("the owner of ", root_, " changes all the time"));
}

absl::StatusOr<OwnerFile::Outcome> OwnerFile::SettleOwn(const Claim& claim) {
  const absl::Status there = file_system_->KindOf(Path(UnsettledName(claim.number))).status();
  if (absl::IsNotFound(there)) return Outcome::kSettled;
  DDP_RETURN_IF_ERROR(there);
  return Settle(claim);
}

// Runs steps 3 to 5.
absl::StatusOr<OwnerFile::Outcome> OwnerFile::Settle(const Claim& claim) {
  const std::string name = UnsettledName(claim.number);
  const absl::StatusOr<Claim> current = Current();
  const bool in_force =
      current.ok() && current->number == claim.number && current->owner.IsSame(claim.owner);
  if (!in_force) {
    DDP_RETURN_IF_ERROR(Remove(name));
    if (!current.ok() && !absl::IsNotFound(current.status())) return current.status();
    return Outcome::kLost;
  }
  DDP_RETURN_IF_ERROR(RemoveUnsettled(claim.number));
  const absl::Status settled = file_system_->ReplaceFile(Path(name), Path(kOwnerName));
  if (absl::IsNotFound(settled)) return Outcome::kLost;
  DDP_RETURN_IF_ERROR(settled);
  DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(root_));
  return Outcome::kSettled;
}

absl::Status OwnerFile::RemoveUnsettled(int64_t below) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_->ListDirectory(root_));
  for (const std::string& name : names) {
    const std::optional<int64_t> number = ParseUnsettledName(name);
    if (!number.has_value() || *number >= below) continue;
    DDP_RETURN_IF_ERROR(Remove(name));
  }
  return absl::OkStatus();
}

absl::Status OwnerFile::Remove(const std::string& name) {
  const absl::StatusOr<EntryKind> kind = file_system_->KindOf(Path(name));
  if (absl::IsNotFound(kind.status())) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(kind.status());
  if (*kind != EntryKind::kFile) return absl::OkStatus();
  const absl::Status removed = file_system_->RemoveFile(Path(name));
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

absl::Status OwnerFile::Check(const Claim& claim) const {
  DDP_ASSIGN_OR_RETURN(const Claim current, Current());
  if (current.number == claim.number && current.owner.IsSame(claim.owner)) return absl::OkStatus();
  std::string text = ClaimText(current);
  text.pop_back();
  return absl::FailedPreconditionError(
      absl::StrCat(root_, " now belongs to another generation, which saves in its place: ", text));
}

}  // namespace ddp::elastic
