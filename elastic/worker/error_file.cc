#include "elastic/worker/error_file.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <typeinfo>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/unique_fd.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

struct Description {
  std::string summary;  // "<type>: <text>", one line
  std::string detail;   // everything the exception says, if that is more; else empty
};

std::string TypeName(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return status == 0 && name != nullptr ? name.get() : type.name();
}

// LibTorch's exceptions say where they were thrown, with a stack of calls, after the text.
std::string TextWithoutStack(const std::string& text) {
  std::string head = text.substr(0, text.find("\nException raised from "));
  while (!head.empty() && head.back() == '\n') head.pop_back();
  for (char& character : head) {
    if (character == '\n') character = ' ';
  }
  return head;
}

Description Describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    const std::string text = exception.what();
    const std::string line = TextWithoutStack(text);
    return {absl::StrCat(TypeName(typeid(exception)), ": ", line), line == text ? "" : text};
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    const std::string name = type != nullptr ? TypeName(*type) : "unknown";
    return {absl::StrCat(name, ": an exception that is no std::exception"), ""};
  }
}

Description Terminated() { return {"std::terminate: called without an exception", ""}; }

// 0 or an errno, as below.
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

// Whole or not at all: the reader may look at any moment, and we may be killed at any moment.
int WriteFile(const std::string& path, const std::string& text) {
  const std::string beside = absl::StrCat(path, ".tmp", getpid());
  int error = 0;
  {
    const UniqueFd fd(open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!fd.valid()) return errno;
    error = WriteAll(fd.get(), text);
  }
  if (error == 0 && rename(beside.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) unlink(beside.c_str());
  return error;
}

std::string ErrorJson(const Description& description) {
  const nlohmann::json json = {
      {"message",
       {{"message", description.summary},
        {"extraInfo",
         {{"py_callstack", description.detail},
          {"timestamp", absl::StrCat(absl::ToUnixSeconds(absl::Now()))}}}}}};
  // An exception's text may be any bytes; JSON is UTF-8.
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// The one error of this process, to the file.
void WriteOnce(const Description& description) {
  static std::atomic<bool> written{false};
  if (written.exchange(true)) return;
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || path[0] == '\0') return;
  const int error = WriteFile(path, ErrorJson(description));
  if (error != 0) {
    std::fprintf(stderr, "cannot write the error file %s: %s\n", path, std::strerror(error));
  }
}

void Print(const Description& description) {
  std::fprintf(stderr, "%s\n", description.summary.c_str());
}

// Process-wide because std::terminate's handler is.
std::atomic<std::terminate_handler> previous_handler{nullptr};

void OnTerminate() {
  // An error inside this function must not come back to it.
  thread_local bool inside = false;
  if (inside) std::abort();
  inside = true;
  // The first thread here writes, then ends the process; it never unlocks. Another one that fails
  // meanwhile must not end the process before the file is whole.
  static std::timed_mutex first;
  if (first.try_lock_for(std::chrono::seconds(5))) {
    const std::exception_ptr error = std::current_exception();
    const Description description = error != nullptr ? Describe(error) : Terminated();
    Print(description);
    WriteOnce(description);
  }
  const std::terminate_handler previous = previous_handler.load();
  if (previous != nullptr) previous();
  std::abort();
}

}  // namespace

int run_worker(const std::function<int()>& body) {
  install_terminate_handler();
  try {
    return body();
  } catch (...) {
    const Description description = Describe(std::current_exception());
    Print(description);
    WriteOnce(description);
    return 1;
  }
}

void install_terminate_handler() {
  const std::terminate_handler previous = std::set_terminate(&OnTerminate);
  if (previous != &OnTerminate) previous_handler.store(previous);
}

void write_error_file(const std::exception_ptr& error) { WriteOnce(Describe(error)); }

}  // namespace ddp::elastic
