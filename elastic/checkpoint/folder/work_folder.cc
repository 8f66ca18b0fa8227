#include "elastic/checkpoint/folder/work_folder.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "elastic/checkpoint/format/manifest.h"

namespace ddp::elastic {
namespace {

constexpr char kWritingPrefix[] = ".tmp-";
constexpr char kRetiredPrefix[] = ".del-";

// Parses "00003": at least five digits, in the spelling that a save uses.
std::optional<uint32_t> ParseFiveDigits(const std::string& text) {
  uint32_t number = 0;
  if (!absl::SimpleAtoi(text, &number) || absl::StrFormat("%05d", number) != text) {
    return std::nullopt;
  }
  return number;
}

}  // namespace

std::string WorkFolderName(const WorkFolder& folder) {
  return absl::StrCat(folder.retired ? kRetiredPrefix : kWritingPrefix, FolderName(folder.id), ".",
                      folder.nonce);
}

bool LooksLikeWorkFolder(const std::string& name) {
  return absl::StartsWith(name, kWritingPrefix) || absl::StartsWith(name, kRetiredPrefix);
}

std::optional<WorkFolder> ParseWorkFolderName(const std::string& name) {
  if (!LooksLikeWorkFolder(name)) return std::nullopt;
  WorkFolder folder;
  folder.retired = absl::StartsWith(name, kRetiredPrefix);
  const size_t dot = name.rfind('.');
  const size_t begin = sizeof(kWritingPrefix) - 1;
  if (dot <= begin) return std::nullopt;
  const std::optional<CheckpointId> id = ParseFolderName(name.substr(begin, dot - begin));
  folder.nonce = name.substr(dot + 1);
  if (!id.has_value() || !IsPlainNonce(folder.nonce)) return std::nullopt;
  folder.id = *id;
  return folder;
}

bool IsPlainNonce(const std::string& nonce) {
  return !nonce.empty() && nonce.size() <= 100 &&
         std::all_of(nonce.begin(), nonce.end(), [](char character) {
           return absl::ascii_isalnum(static_cast<unsigned char>(character)) || character == '-';
         });
}

bool IsCheckpointFile(const std::string& name) {
  if (name == kManifestName) return true;
  absl::string_view stem = name;
  if (!absl::ConsumeSuffix(&stem, ".safetensors")) return false;
  const std::vector<std::string> parts = absl::StrSplit(stem, '-');
  if (parts.size() == 2) return parts[0] == "extra" && ParseFiveDigits(parts[1]).has_value();
  if (parts.size() != 4 || (parts[0] != "model" && parts[0] != "optimizer") || parts[2] != "of") {
    return false;
  }
  const std::optional<uint32_t> number = ParseFiveDigits(parts[1]);
  const std::optional<uint32_t> count = ParseFiveDigits(parts[3]);
  return number.has_value() && count.has_value() && *number >= 1 && *number <= *count;
}

}  // namespace ddp::elastic
