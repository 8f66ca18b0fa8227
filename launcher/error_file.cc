#include "launcher/error_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace ddp::launcher {
namespace {

using Json = nlohmann::json;

// Deeper than any honest writer nests; the parser's stack and the JSON tree's destructor are
// recursive in it.
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

// Escape sequences and the like become '?'; tabs and newlines stay.
std::string Printable(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f) c = '?';
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

std::string TextAt(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return "";
  return Printable(found->get<std::string>());
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

}  // namespace

absl::StatusOr<ErrorFile> ParseErrorFile(const std::string& text) {
  if (NestsTooDeep(text)) return absl::InvalidArgumentError("it nests too deep");
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return absl::InvalidArgumentError("it is not JSON");
  if (!root.is_object()) return absl::InvalidArgumentError("it is not a JSON object");
  const auto message = root.find("message");
  if (message == root.end()) return absl::InvalidArgumentError("it has no \"message\"");
  ErrorFile result;
  if (message->is_string()) {
    result.message = Printable(message->get<std::string>());
    result.time = TimeAt(root, "timestamp");
  } else if (message->is_object()) {
    result.message = TextAt(*message, "message");
    const auto extra = message->find("extraInfo");
    if (extra != message->end() && extra->is_object()) {
      result.callstack = TextAt(*extra, "py_callstack");
      result.time = TimeAt(*extra, "timestamp");
    }
  }
  if (result.message.empty()) return absl::InvalidArgumentError("its \"message\" holds no text");
  return result;
}

absl::StatusOr<ErrorFile> ReadErrorFile(const std::string& path) {
  // Not blocking, for the case that it is a pipe.
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.valid()) {
    const std::string text = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(text) : absl::InvalidArgumentError(text);
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  std::string text(kMaxErrorFileBytes + 1, '\0');
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
  if (size > kMaxErrorFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": larger than ", kMaxErrorFileBytes, " bytes"));
  }
  text.resize(size);
  absl::StatusOr<ErrorFile> result = ParseErrorFile(text);
  if (!result.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", result.status().message()));
  }
  return result;
}

}  // namespace ddp::launcher
