// The exceptions of ddp/. All derive from c10::Error, as LibTorch users expect. what() has no stack
// trace.
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

// The program or its start is wrong: environment variables, arguments or options that are not
// usable, or a model that differs between the ranks.
class ConfigurationError : public c10::Error {
 public:
  explicit ConfigurationError(const std::string& message)
      : c10::Error(internal::WithoutStackTrace(message), nullptr) {}
};

// A gradient reduction failed on this rank, and not in a collective: the training loop left it
// unfinished or asked for it twice, a hook threw or returned a wrong result, or this rank reported
// a failure itself.
class ReductionError : public c10::Error {
 public:
  explicit ReductionError(const std::string& message)
      : c10::Error(internal::WithoutStackTrace(message), nullptr) {}
};

// The ranks could not communicate: an operation timed out, the network or the store failed, or the
// ranks were in different collectives. The next synchronized forward, or ProcessGroup::renew(),
// reconnects the ranks. When a rank is gone for good, every later call on the group
// throws as well.
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

  // Returns the rank at fault: it reported the first failure, its process ended, it left the group,
  // it did not come to a renewal, or it shows no sign of life. A rank that stopped because of
  // another rank's failure report does not count.
  int rank() const { return rank_; }

 private:
  int rank_;
};

}  // namespace ddp

#endif  // DDP_COMMON_ERROR_H_
