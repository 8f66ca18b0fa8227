// A worker for tests of ddprun that is in uninterruptible sleep until it is killed: the parent of a
// vfork() waits so for its child.

#include <unistd.h>

int main() {
  if (::vfork() == 0) {
    for (;;) ::pause();
  }
  return 0;
}
