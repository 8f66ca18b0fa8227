// Executes a program for which system calls fail, as in a container with a filter of them:
//
//   refuse_calls ERRNO CALL... -- PROGRAM ARGUMENT...
//
// ERRNO is a number, CALL a name of kCalls. Exit code 125: filters are not allowed here.

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "testing/refused_calls.h"

int main(int argc, char** argv) {
  const std::map<std::string, int> kCalls = {{"clone3", SYS_clone3},
                                             {"memfd_create", SYS_memfd_create},
                                             {"pidfd_open", SYS_pidfd_open},
                                             {"pidfd_send_signal", SYS_pidfd_send_signal}};
  std::map<int, int> errors;
  int i = 2;
  for (; i < argc && std::strcmp(argv[i], "--") != 0; ++i) {
    errors[kCalls.at(argv[i])] = std::atoi(argv[1]);
  }
  if (i + 1 >= argc) return 2;
  if (!ddp::testing::RefuseCalls(errors)) return 125;
  ::execvp(argv[i + 1], argv + i + 1);
  std::perror(argv[i + 1]);
  return 127;
}
