// What ddp/ throws. All are c10::Error, as LibTorch users expect; what() is one text without a
// stack trace that names the rank and what to do.
#ifndef DDP_ERROR_H_
#define DDP_ERROR_H_

#include <algorithm>
#include <string>

#include <c10/util/Exception.h>

namespace ddp {

namespace internal {

// `text` without the lines of LibTorch's stack traces, which the texts of its errors contain, also
// where one error quotes another.
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

}  // namespace internal

// The program or its start is at fault: environment variables, options, a model that differs
// between the ranks.
class ConfigurationError : public c10::Error {
 public:
  explicit ConfigurationError(const std::string& message)
      : c10::Error(internal::WithoutStackTrace(message), nullptr) {}
};

// A gradient reduction that the training loop left unfinished or asked for twice.
class ReductionError : public c10::Error {
 public:
  explicit ReductionError(const std::string& message)
      : c10::Error(internal::WithoutStackTrace(message), nullptr) {}
};

// A collective did not complete: time ran out, the network failed. The next synchronized forward,
// or ProcessGroup::renew(), meets the other ranks again; what is gone for good stays an error.
class CommunicationError : public c10::DistError {
 public:
  explicit CommunicationError(const std::string& message)
      : c10::DistError(internal::WithoutStackTrace(message), nullptr) {}
};

// A peer said that it cannot go on, and why.
class PeerFailedError : public CommunicationError {
 public:
  PeerFailedError(int rank, const std::string& message)
      : CommunicationError(message), rank_(rank) {}

  // The rank that failed first: by its own report, or because its process has ended, or it has left
  // the group, or it gives no sign of life. Never a rank that gave up because of another one.
  int rank() const { return rank_; }

 private:
  int rank_;
};

}  // namespace ddp

#endif  // DDP_ERROR_H_
