#include "elastic/error_file/error_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace ddp::elastic {
namespace {

using Json = nlohmann::json;

// No program nests deeper on purpose. The parser and the JSON tree's destructor recurse once per
// level.
constexpr int kMaxNesting = 32;

bool NestsTooDeep(const std::string& text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxNesting) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

// Replaces control characters by '?', except tabs and newlines. Terminals may also obey the 8-bit
// controls U+0080 to U+009F, which have two bytes in UTF-8.
std::string Printable(const std::string& original) {
  std::string text;
  text.reserve(original.size());
  for (size_t i = 0; i < original.size(); ++i) {
    const char c = original[i];
    const auto byte = static_cast<unsigned char>(c);
    const auto next = static_cast<unsigned char>(i + 1 < original.size() ? original[i + 1] : 0);
    const bool has_two_bytes = byte == 0xc2 && next >= 0x80 && next < 0xa0;
    const bool is_control = (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f;
    text.push_back(is_control || has_two_bytes ? '?' : c);
    if (has_two_bytes) ++i;
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

// Returns lines that are stored as one text or as a list.
std::string LinesAt(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return "";
  if (found->is_string()) return Printable(found->get<std::string>());
  std::string lines;
  if (!found->is_array()) return "";
  for (const Json& line : *found) {
    if (!line.is_string()) continue;
    absl::StrAppend(&lines, line.get<std::string>());
    if (!absl::EndsWith(lines, "\n")) lines.push_back('\n');
  }
  return Printable(lines);
}

// Returns the last line of a call stack, which in Python is the exception.
std::string LastLine(const std::string& text) { return text.substr(text.find_last_of('\n') + 1); }

std::string TextAt(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return "";
  return Printable(found->get<std::string>());
}

std::optional<bool> BooleanAt(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_boolean()) return std::nullopt;
  return found->get<bool>();
}

absl::Time TimeAt(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return absl::InfinitePast();
  double seconds = 0;
  if (found->is_number()) {
    seconds = found->get<double>();
  } else if (!found->is_string() || !absl::SimpleAtod(found->get<std::string>(), &seconds)) {
    return absl::InfinitePast();
  }
  constexpr double kYear2200 = 7.2582e9;
  if (!(seconds > 0 && seconds < kYear2200)) return absl::InfinitePast();
  return absl::UnixEpoch() + absl::Seconds(seconds);
}

// Matches a report of a lost peer that holds both `place` (its source) and `what`.
struct VictimText {
  absl::string_view place;
  absl::string_view what;
};

constexpr VictimText kVictimTexts[] = {
    // "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [...]"
    {"gloo/", "Connection closed by peer"},
    {"gloo/", "Connection reset by peer"},
    {"gloo/", "Broken pipe"},
    {"gloo/", "Connection refused"},
    {"gloo/", "Application timeout caused pair closure"},
    {"gloo/", "Timed out waiting"},
    {"Gloo connectFullMesh failed", ""},
    {"NCCL", "ncclRemoteError"},
    {"NCCL", "Connection closed by remote peer"},
    {"NCCL", "remote process exited or there was a network error"},
    {"TCPStore", "Connection was likely closed"},
    // The store's socket: this text names no source but itself.
    {"Failed to recv, got 0 bytes", "Did the remote server shutdown or crash?"},
};

}  // namespace

bool SoundsLikeVictim(absl::string_view message) {
  for (const VictimText& text : kVictimTexts) {
    if (absl::StrContains(message, text.place) && absl::StrContains(message, text.what)) {
      return true;
    }
  }
  return false;
}

std::string FormatErrorRecord(const ErrorRecord& record) {
  Json extra = {{"py_callstack", record.callstack},
                {"timestamp", absl::StrCat(absl::ToUnixSeconds(record.time))}};
  if (record.is_victim || SoundsLikeVictim(record.message)) extra["victim"] = record.is_victim;
  const Json json = {{"message", {{"message", record.message}, {"extraInfo", std::move(extra)}}}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<ErrorRecord> ParseErrorRecord(const std::string& text) {
  if (NestsTooDeep(text)) return absl::InvalidArgumentError("it nests too deep");
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return absl::InvalidArgumentError("it is not JSON");
  if (!root.is_object()) return absl::InvalidArgumentError("it is not a JSON object");
  const auto message = root.find("message");
  if (message == root.end()) return absl::InvalidArgumentError("it has no \"message\"");
  ErrorRecord result;
  std::optional<bool> is_victim;
  const Json* extra_owner = &root;
  if (message->is_string()) {
    result.message = Printable(message->get<std::string>());
    result.time = TimeAt(root, "timestamp");
  } else if (message->is_object()) {
    result.message = TextAt(*message, "message");
    extra_owner = &*message;
  }
  const auto extra = extra_owner->find("extraInfo");
  if (extra != extra_owner->end() && extra->is_object()) {
    result.callstack = LinesAt(*extra, "py_callstack");
    if (result.time == absl::InfinitePast()) result.time = TimeAt(*extra, "timestamp");
    is_victim = BooleanAt(*extra, "victim");
  }
  if (result.message.empty()) result.message = LastLine(result.callstack);
  if (result.message.empty()) return absl::InvalidArgumentError("its \"message\" holds no text");
  result.is_victim = is_victim.has_value() ? *is_victim : SoundsLikeVictim(result.message);
  return result;
}

absl::StatusOr<ErrorRecord> ReadErrorRecord(const std::string& path) {
  // O_NONBLOCK, because the path may be a pipe.
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.valid()) {
    const std::string text = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(text) : absl::InvalidArgumentError(text);
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  std::string text(kMaxErrorRecordBytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t count = ::read(fd.get(), text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
    }
    if (count == 0) break;
    size += static_cast<size_t>(count);
  }
  if (size == 0) return absl::NotFoundError(absl::StrCat(path, ": empty"));
  if (size > kMaxErrorRecordBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": larger than ", kMaxErrorRecordBytes, " bytes"));
  }
  text.resize(size);
  absl::StatusOr<ErrorRecord> result = ParseErrorRecord(text);
  if (!result.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", result.status().message()));
  }
  return result;
}

}  // namespace ddp::elastic
