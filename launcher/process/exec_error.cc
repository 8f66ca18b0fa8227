#include "launcher/process/exec_error.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "launcher/output/printable.h"

namespace ddp::launcher {
namespace {

constexpr char kElf[] = "\177ELF";

// Returns the part of `program` that the kernel looks at; nullopt when it cannot be read.
std::optional<std::string> HeadOf(const std::string& program) {
  std::array<char, 256> head{};
  const UniqueFd file(::open(program.c_str(), O_RDONLY | O_CLOEXEC));
  const ssize_t size = file.valid() ? ::read(file.get(), head.data(), head.size()) : -1;
  if (size < 0) return std::nullopt;
  return std::string(head.data(), static_cast<size_t>(size));
}

// Returns the interpreter that the first line of a script names.
std::string InterpreterOf(const std::string& head) {
  std::string line = head.substr(2, head.find('\n') - 2);
  line.erase(0, line.find_first_not_of(" \t"));
  return line.substr(0, line.find_first_of(" \t"));
}

// Explains ENOENT for a file that exists.
std::string WhatIsMissing(const std::string& head) {
  if (!absl::StartsWith(head, "#!")) return "the loader that it wants is not on this machine";
  std::string interpreter = InterpreterOf(head);
  const bool from_windows = absl::EndsWith(interpreter, "\r");
  if (from_windows) interpreter.pop_back();
  return absl::StrCat(
      "its first line names the interpreter ", Printable(interpreter),
      from_windows ? " and ends as on Windows (CR LF), which must be LF" : ", which is not there");
}

// Explains ENOEXEC.
std::string WhyNoProgram(const std::string& head) {
  if (head.empty()) return "the file is empty";
  if (absl::StartsWith(head, kElf)) {
    return "it is a program for another kind of machine";
  }
  if (absl::StartsWith(head, "#!") && !InterpreterOf(head).empty()) {
    return absl::StrCat("its first line names the interpreter ", Printable(InterpreterOf(head)),
                        ", which is no program for this machine");
  }
  return "it is no program: a script needs a first line with #!, and a Python script runs with "
         "--run-path";
}

std::string Why(const std::string& program, int error) {
  if (error != ENOENT && error != ENOEXEC) return std::strerror(error);
  const std::optional<std::string> head = HeadOf(program);
  if (!head.has_value()) return std::strerror(error);
  return error == ENOENT ? WhatIsMissing(*head) : WhyNoProgram(*head);
}

}  // namespace

absl::Status ExecError(const std::string& program, int error) {
  const std::string text = absl::StrCat("cannot run ", program, ": ", Why(program, error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == EACCES || error == EPERM || error == ENOEXEC) {
    return absl::PermissionDeniedError(text);
  }
  return absl::InternalError(text);
}

}  // namespace ddp::launcher
