#ifndef DDP_TESTING_REFUSED_CALLS_H_
#define DDP_TESTING_REFUSED_CALLS_H_

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

#include <map>
#include <vector>

namespace ddp::testing {

// Makes system calls of this thread fail from now on, and those of the threads and processes that
// it starts. `errors` holds the errno of each call (SYS_...). Returns false when filters of system
// calls are not allowed here.
inline bool RefuseCalls(const std::map<int, int>& errors) {
  std::vector<sock_filter> filter = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const auto& [call, error] : errors) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  sock_fprog program = {.len = static_cast<unsigned short>(filter.size()), .filter = filter.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_REFUSED_CALLS_H_
