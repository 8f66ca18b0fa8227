#ifndef DDP_TESTING_STALLED_FILE_H_
#define DDP_TESTING_STALLED_FILE_H_

#include <string>

#include "base/unique_fd.h"

namespace ddp::testing {

// Makes open(2) and execve(2) of one file block in the kernel, as on a stalled mount. It holds
// a lease on the file, which the kernel first asks back (fcntl(2), F_SETLEASE). Calls that block
// for more than 45 s continue by themselves. Ignores SIGIO in this process. Thread-compatible.
class StalledFile {
 public:
  // The file must exist, belong to this user, and not be open in any process.
  explicit StalledFile(const std::string& path);

  // Returns false when this file system has no leases, so no call blocks.
  bool stalls() const { return lease_.valid(); }

  // Ends the stall: no call blocks any more.
  void Release();

 private:
  UniqueFd lease_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_STALLED_FILE_H_
