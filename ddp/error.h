// What ddp/ throws. All are c10::Error, as LibTorch users expect; what() is one text without a
// stack trace that names the rank and what to do.
#ifndef DDP_ERROR_H_
#define DDP_ERROR_H_

#include <string>
#include <utility>

#include <c10/util/Exception.h>

namespace ddp {

// The program or its start is at fault: environment variables, options, a model that differs
// between the ranks.
class ConfigurationError : public c10::Error {
 public:
  explicit ConfigurationError(std::string message) : c10::Error(std::move(message), nullptr) {}
};

// A gradient reduction that the training loop left unfinished or asked for twice.
class ReductionError : public c10::Error {
 public:
  explicit ReductionError(std::string message) : c10::Error(std::move(message), nullptr) {}
};

// A collective did not complete: time ran out, the network failed. The next synchronized forward,
// or ProcessGroup::renew(), meets the other ranks again; what is gone for good stays an error.
class CommunicationError : public c10::DistError {
 public:
  explicit CommunicationError(std::string message) : c10::DistError(std::move(message), nullptr) {}
};

// A peer said that it cannot go on, and why.
class PeerFailedError : public CommunicationError {
 public:
  PeerFailedError(int rank, std::string message)
      : CommunicationError(std::move(message)), rank_(rank) {}

  // The rank that failed first: by its own report, or because its process has ended, or it has left
  // the group, or it gives no sign of life. Never a rank that gave up because of another one.
  int rank() const { return rank_; }

 private:
  int rank_;
};

}  // namespace ddp

#endif  // DDP_ERROR_H_
