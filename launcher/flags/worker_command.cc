#include "launcher/flags/worker_command.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/process/path_search.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

absl::Status CheckExecutable(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    const std::string text = absl::StrCat("cannot run ", path, ": ", std::strerror(errno));
    return errno == EACCES ? absl::PermissionDeniedError(text) : absl::NotFoundError(text);
  }
  if (S_ISDIR(info.st_mode)) {
    return absl::PermissionDeniedError(absl::StrCat("cannot run ", path, ": it is a folder"));
  }
  if (::access(path.c_str(), X_OK) != 0) {
    return absl::PermissionDeniedError(absl::StrCat("cannot run ", path,
                                                    ": it is not executable (chmod +x ", path,
                                                    "; a Python script runs with --run-path)"));
  }
  return absl::OkStatus();
}

// Returns the path of `program`, as execvp would find it.
absl::StatusOr<std::string> FindExecutable(const std::string& program,
                                           const std::optional<std::string>& path) {
  if (absl::StrContains(program, '/')) {
    DDP_RETURN_IF_ERROR(CheckExecutable(program));
    return program;
  }
  const std::optional<std::string> found = SearchPath(program, path.value_or(kDefaultPath));
  if (found.has_value()) return *found;
  std::string hint;
  if (IsRegularFile(program)) {
    hint = absl::StrCat("; did you mean ./", program,
                        IsExecutableFile(program)
                            ? "?"
                            : ", which is not executable (chmod +x)? A Python script runs with "
                              "--run-path");
  }
  return absl::NotFoundError(
      absl::StrCat("cannot run ", program, ": no such program on PATH", hint));
}

absl::StatusOr<std::string> FindPython(const ProgramRequest& request) {
  if (request.python_exec.has_value() && !request.python_exec->empty()) {
    absl::StatusOr<std::string> python = FindExecutable(*request.python_exec, request.path);
    if (python.ok()) return python;
    return absl::Status(python.status().code(),
                        absl::StrCat("PYTHON_EXEC: ", python.status().message()));
  }
  absl::StatusOr<std::string> python = FindExecutable("python3", request.path);
  if (python.ok()) return python;
  return absl::NotFoundError(absl::StrCat("cannot run ", request.program[0],
                                          ": python3 is not on PATH (install it, or set"
                                          " PYTHON_EXEC)"));
}

absl::Status CheckScript(const std::string& script) {
  struct stat info {};
  // A folder or a zip file with a __main__.py is a script too; python looks into those itself.
  if (::stat(script.c_str(), &info) != 0) {
    return absl::NotFoundError(absl::StrCat("cannot run ", script, ": ", std::strerror(errno)));
  }
  if (::access(script.c_str(), R_OK) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot run ", script, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> WorkerCommand(const ProgramRequest& request) {
  const std::string& name = request.program[0];
  const bool is_module = request.kind == ProgramKind::kPythonModule;
  const bool is_script = request.kind == ProgramKind::kPythonScript ||
                         (request.kind == ProgramKind::kByName && absl::EndsWith(name, ".py"));
  std::vector<std::string> command;
  if (is_module || is_script) {
    if (is_script) DDP_RETURN_IF_ERROR(CheckScript(name));
    DDP_ASSIGN_OR_RETURN(std::string python, FindPython(request));
    command = {std::move(python), "-u"};
    if (is_module) command.push_back("-m");
    command.push_back(name);
  } else {
    DDP_ASSIGN_OR_RETURN(std::string program, FindExecutable(name, request.path));
    command.push_back(std::move(program));
  }
  command.insert(command.end(), request.program.begin() + 1, request.program.end());
  return command;
}

}  // namespace ddp::launcher
