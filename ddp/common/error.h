// The exceptions of ddp/. All derive from c10::Error, as LibTorch users expect. what() is one text
// without a stack trace; it names the rank and what to do.
#ifndef DDP_COMMON_ERROR_H_
#define DDP_COMMON_ERROR_H_

#include <algorithm>
#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace ddp {

namespace internal {

// Returns `text` without the lines of LibTorch stack traces. Messages of LibTorch's errors contain
// such lines, also where one error quotes another.
inline std::string WithoutStackTrace(const std::string& text) {
  std::string result;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    if (line.rfind("Exception raised from ", 0) == 0 || line.rfind("frame #", 0) == 0) continue;
    result += (result.empty() ? "" : "\n") + line;
  }
  while (!result.empty() && result.back() == '\n') result.pop_back();
  return result;
}

// Returns the message of `error`, of any type, without a stack trace.
inline std::string MessageOf(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return WithoutStackTrace(torch_error != nullptr ? torch_error->what_without_backtrace()
                                                  : error.what());
}

}  // namespace internal

// The program or its start is wrong: environment variables, options, or a model that differs
// between the ranks.
class ConfigurationError : public c10::Error {
 public:
  explicit ConfigurationError(const std::string& message)
      : c10::Error(internal::WithoutStackTrace(message), nullptr) {}
};

// The training loop left a gradient reduction unfinished, or asked for it twice.
class ReductionError : public c10::Error {
 public:
  explicit ReductionError(const std::string& message)
      : c10::Error(internal::WithoutStackTrace(message), nullptr) {}
};

// A collective did not complete: it timed out or the network failed. The next synchronized forward,
// or ProcessGroup::renew(), reconnects the ranks. When a rank is gone for good, the error stays.
class CommunicationError : public c10::DistError {
 public:
  explicit CommunicationError(const std::string& message)
      : c10::DistError(internal::WithoutStackTrace(message), nullptr) {}
};

// A peer reported that it cannot continue, or is gone. The message has the reason.
class PeerFailedError : public CommunicationError {
 public:
  PeerFailedError(int rank, const std::string& message)
      : CommunicationError(message), rank_(rank) {}

  // Returns the rank that failed first: it reported a failure, its process ended, it left the
  // group, or it shows no sign of life. Never a rank that gave up because of another one.
  int rank() const { return rank_; }

 private:
  int rank_;
};

}  // namespace ddp

#endif  // DDP_COMMON_ERROR_H_
