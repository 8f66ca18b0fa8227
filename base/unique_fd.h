#ifndef DDP_BASE_UNIQUE_FD_H_
#define DDP_BASE_UNIQUE_FD_H_

#include <unistd.h>

#include <utility>

#include "base/language.h"

namespace ddp {

// Owns one file descriptor and closes it. Move-only; -1 means "none". Thread-compatible.
//
// The result of close() is dropped. A writer that needs the result calls release(), and then
// fsync() and close() itself.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  // Transfers ownership of the descriptor to the caller.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace ddp

#endif  // DDP_BASE_UNIQUE_FD_H_
