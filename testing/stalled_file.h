#ifndef DDP_TESTING_STALLED_FILE_H_
#define DDP_TESTING_STALLED_FILE_H_

#include <string>

#include "base/unique_fd.h"

namespace ddp::testing {

// Makes open(2) and execve(2) of one file wait in the kernel, as on a mount that has stalled: by a
// lease on the file, which the kernel asks back first (fcntl(2), F_SETLEASE). Waits of more than
// 45 s end by themselves. Ignores SIGIO in this process. Thread-compatible.
class StalledFile {
 public:
  // The file exists, belongs to this user, and nobody has it open.
  explicit StalledFile(const std::string& path);

  // False: this file system has no leases.
  bool stalls() const { return lease_.valid(); }

  // From now on nobody waits.
  void Release();

 private:
  UniqueFd lease_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_STALLED_FILE_H_
