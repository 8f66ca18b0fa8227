#include "elastic/worker/error_file.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <typeinfo>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/unique_fd.h"
#include "elastic/error_file/error_record.h"
#include "elastic/worker/first_error.h"

namespace ddp::elastic {
namespace {

// The mangled name of the exception of a rank whose peer failed first. A name and not the class:
// this file does not link LibTorch.
constexpr char kPeerFailedError[] = "N3ddp15PeerFailedErrorE";

// Returns true when `type` is the class with the mangled name `name`, or is derived from it.
bool IsA(const std::type_info& type, const char* name) {
  if (std::strcmp(type.name(), name) == 0) return true;
  if (const auto* single = dynamic_cast<const abi::__si_class_type_info*>(&type)) {
    return IsA(*single->__base_type, name);
  }
  if (const auto* several = dynamic_cast<const abi::__vmi_class_type_info*>(&type)) {
    for (unsigned i = 0; i < several->__base_count; ++i) {
      if (IsA(*several->__base_info[i].__base_type, name)) return true;
    }
  }
  return false;
}

std::string TypeName(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return status == 0 && name != nullptr ? name.get() : type.name();
}

// Cuts off the call stack that LibTorch's exceptions append to their text.
std::string TextWithoutStack(const std::string& text) {
  std::string head = text.substr(0, text.find("\nException raised from "));
  while (!head.empty() && head.back() == '\n') head.pop_back();
  for (char& character : head) {
    if (character == '\n') character = ' ';
  }
  return head;
}

// Makes the message the line "<type>: <text>". The call stack is all of what(), when that is more
// than the line.
ErrorRecord Describe(const std::exception_ptr& error) {
  ErrorRecord record{.message = "", .time = absl::Now()};
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    const std::string text = exception.what();
    const std::string line = TextWithoutStack(text);
    record.message = absl::StrCat(TypeName(typeid(exception)), ": ", line);
    record.callstack = line == text ? "" : text;
    record.is_victim = IsA(typeid(exception), kPeerFailedError);
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    const std::string name = type != nullptr ? TypeName(*type) : "unknown";
    record.message = absl::StrCat(name, ": an exception that is no std::exception");
  }
  return record;
}

ErrorRecord Terminated() {
  return {.message = "std::terminate: called without an exception", .time = absl::Now()};
}

// Returns 0 or an errno, as WriteFile() does.
int WriteAll(int fd, const std::string& text) {
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t result = write(fd, text.data() + written, text.size() - written);
    if (result < 0 && errno == EINTR) continue;
    if (result <= 0) return result < 0 ? errno : EIO;
    written += static_cast<size_t>(result);
  }
  return 0;
}

// Writes the whole file or nothing: the launcher may read, and this process may be killed, at any
// moment.
int WriteFile(const std::string& path, const std::string& text) {
  const std::string beside = absl::StrCat(path, ".tmp", getpid());
  int error = 0;
  {
    const UniqueFd fd(
        open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!fd.valid()) return errno;
    error = WriteAll(fd.get(), text);
  }
  if (error == 0 && rename(beside.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) unlink(beside.c_str());
  return error;
}

// Writes the first error of this process to the file. Ignores later errors.
void WriteOnce(const ErrorRecord& record) {
  if (!ClaimFirstError()) return AwaitFirstError();
  const char* path = std::getenv(kErrorFileVariable);
  if (path != nullptr && path[0] != '\0') {
    const int error = WriteFile(path, FormatErrorRecord(record));
    if (error != 0) {
      std::fprintf(stderr, "cannot write the error file %s: %s\n", path, std::strerror(error));
    }
  }
  FinishFirstError();
}

// Process-wide, as the handler of std::terminate is.
std::atomic<std::terminate_handler> previous_handler{nullptr};

void OnTerminate() {
  // An error inside this function must not come back to it.
  thread_local bool inside = false;
  if (inside) std::abort();
  inside = true;
  // Also waits for another thread that is writing its error: this process must not end before.
  internal::report_error(std::current_exception());
  const std::terminate_handler previous = previous_handler.load();
  if (previous != nullptr) previous();
  std::abort();
}

}  // namespace

void install_terminate_handler() {
  const std::terminate_handler previous = std::set_terminate(&OnTerminate);
  if (previous != &OnTerminate) previous_handler.store(previous);
}

void write_error_file(const std::exception_ptr& error) { WriteOnce(Describe(error)); }

namespace internal {

void report_error(const std::exception_ptr& error) {
  const ErrorRecord record = error != nullptr ? Describe(error) : Terminated();
  std::fprintf(stderr, "%s\n", record.message.c_str());
  WriteOnce(record);
}

}  // namespace internal

}  // namespace ddp::elastic
