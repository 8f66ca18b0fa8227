#include "testing/stalled_file.h"

#include <fcntl.h>
#include <signal.h>

namespace ddp::testing {

StalledFile::StalledFile(const std::string& path) {
  ::signal(SIGIO, SIG_IGN);  // the kernel sends it to ask for the lease
  lease_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (lease_.valid() && ::fcntl(lease_.get(), F_SETLEASE, F_WRLCK) != 0) lease_.reset();
}

// Removes the lease. Closing the descriptor would not: a child has it too until its exec succeeds.
void StalledFile::Release() {
  ::fcntl(lease_.get(), F_SETLEASE, F_UNLCK);
  lease_.reset();
}

}  // namespace ddp::testing
