#include "elastic/worker/fatal_signal.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/under_sanitizer.h"
#include "elastic/error_file/error_record.h"
#include "elastic/worker/error_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

class FatalSignalTest : public ::testing::Test {
 protected:
  struct Result {
    int wait_status = 0;
    pid_t pid = 0;
    std::string standard_error;
    absl::StatusOr<ErrorRecord> record = absl::NotFoundError("not read");
  };

  void SetUp() override {
    if (kUnderSanitizer) {
      GTEST_SKIP() << "the sanitizer has handlers and a report of its own for these signals";
    }
  }

  // Runs `body` in a child process that has installed the handlers.
  static Result RunChild(const std::function<void()>& body) {
    const std::string folder = ::testing::TempDir();
    const std::string path = absl::StrCat(folder, "/error.json");
    const std::string console = absl::StrCat(folder, "/stderr");
    unlink(path.c_str());
    Result result;
    result.pid = fork();
    if (result.pid == 0) {
      const rlimit no_core{0, 0};
      setrlimit(RLIMIT_CORE, &no_core);
      setenv(kErrorFileVariable, path.c_str(), 1);
      dup2(open(console.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      install_fatal_signal_handlers();
      body();
      _exit(0);
    }
    EXPECT_EQ(waitpid(result.pid, &result.wait_status, 0), result.pid);
    std::ostringstream text;
    text << std::ifstream(console).rdbuf();
    result.standard_error = text.str();
    result.record = ReadErrorRecord(path);
    return result;
  }

  // Checks that the process ended by `signal`, with `message` in its error file and on stderr.
  static void Expect(const Result& result, int signal, const std::string& message) {
    EXPECT_TRUE(WIFSIGNALED(result.wait_status)) << result.wait_status;
    EXPECT_EQ(WTERMSIG(result.wait_status), signal);
    ASSERT_TRUE(result.record.ok()) << result.record.status();
    const std::string begin =
        absl::StrCat("Signal ", signal, " \\(SIG[A-Z]+\\) received by PID ", result.pid, message);
    EXPECT_THAT(result.record->message, MatchesRegex(begin));
    EXPECT_THAT(result.standard_error, HasSubstr(result.record->message + "\n"));
    EXPECT_GT(result.record->time, absl::FromUnixSeconds(1'700'000'000));
    EXPECT_FALSE(result.record->is_victim);
  }
};

// Not inlined, so that the function has a frame. Volatile, so that the compiler keeps the read.
__attribute__((noinline, no_sanitize("undefined"))) int ReadFrom(volatile int* address) {
  return *address;
}
__attribute__((noinline, no_sanitize("undefined"))) int Quotient(int dividend, int divisor) {
  return dividend / divisor;
}
volatile int zero = 0;
volatile int sink = 0;

TEST_F(FatalSignalTest, ANullPointerIsReportedWithItsAddressAndAStack) {
  const Result result =
      RunChild([] { sink = ReadFrom(reinterpret_cast<volatile int*>(std::uintptr_t{0x10})); });
  Expect(result, SIGSEGV, ": no memory at address 0x10");
  EXPECT_THAT(result.record->callstack, HasSubstr("fatal_signal_test+0x"));
  EXPECT_THAT(result.record->callstack, HasSubstr("#3 "));
}

TEST_F(FatalSignalTest, MemoryWithoutPermission) {
  Expect(RunChild([] {
           void* memory = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
           sink = ReadFrom(static_cast<volatile int*>(memory));
         }),
         SIGSEGV, ": no permission at address 0x[0-9a-f]+");
}

TEST_F(FatalSignalTest, AFileThatShrankUnderItsMapping) {
  Expect(RunChild([] {
           const int fd = memfd_create("shrinks", MFD_CLOEXEC);
           (void)!ftruncate(fd, 4096);
           void* memory = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
           (void)!ftruncate(fd, 0);
           sink = ReadFrom(static_cast<volatile int*>(memory));
         }),
         SIGBUS, ": bus error at address 0x[0-9a-f]+");
}

#ifdef __x86_64__
TEST_F(FatalSignalTest, DivisionByZero) {
  Expect(RunChild([] { sink = Quotient(100, zero); }), SIGFPE, ": division by zero at 0x[0-9a-f]+");
}

TEST_F(FatalSignalTest, AnIllegalInstruction) {
  Expect(RunChild([] { __builtin_trap(); }), SIGILL, ": illegal instruction at 0x[0-9a-f]+");
}
#endif

TEST_F(FatalSignalTest, Abort) {
  Expect(RunChild([] { std::abort(); }), SIGABRT, ": the program aborted");
}

TEST_F(FatalSignalTest, AForbiddenSystemCall) {
  const Result result = RunChild([] {
    // The filter allows every system call but getpgid.
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getpgid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{.len = 4, .filter = rules};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) != 0) _exit(77);
    syscall(SYS_getpgid, 0);
  });
  if (WIFEXITED(result.wait_status) && WEXITSTATUS(result.wait_status) == 77) {
    GTEST_SKIP() << "seccomp filters are not allowed here";
  }
  Expect(result, SIGSYS, absl::StrCat(": forbidden system call ", SYS_getpgid));
}

TEST_F(FatalSignalTest, ASignalFromAnotherProcess) {
  Expect(RunChild([] {
           const pid_t parent = getpid();
           if (fork() == 0) {
             kill(parent, SIGSEGV);
             _exit(0);
           }
           for (;;) pause();
         }),
         SIGSEGV, ": sent by PID [0-9]+");
}

// Recurses without end, in a way that the compiler cannot detect.
__attribute__((noinline)) int Deeper(volatile char* from) {
  volatile char here[4096];
  here[0] = from[0];
  const int below = zero == 0 ? Deeper(here) : 0;
  return below + here[0];
}

TEST_F(FatalSignalTest, AnOverflowOfTheStack) {
  Expect(RunChild([] {
           volatile char start = 1;
           sink = Deeper(&start);
         }),
         SIGSEGV, ": no (memory|permission) at address 0x[0-9a-f]+");
}

TEST_F(FatalSignalTest, AnotherThread) {
  Expect(RunChild([] { std::thread([] { sink = ReadFrom(nullptr); }).join(); }), SIGSEGV,
         ": no memory at address 0x0");
}

TEST_F(FatalSignalTest, ManyThreadsAtOnceWriteOneFile) {
  for (int round = 0; round < 10; ++round) {
    Expect(RunChild([] {
             std::thread threads[4];
             for (auto& thread : threads) thread = std::thread([] { std::abort(); });
             for (auto& thread : threads) thread.join();
           }),
           SIGABRT, ": the program aborted");
  }
}

TEST_F(FatalSignalTest, AnExceptionBeforeTheAbortIsTheError) {
  const Result result = RunChild([] {
    run_worker([] {
      std::thread([] { throw std::runtime_error("in the loader"); }).join();
      return 0;
    });
  });
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGABRT);
  ASSERT_TRUE(result.record.ok()) << result.record.status();
  EXPECT_THAT(result.record->message, HasSubstr("in the loader"));
  EXPECT_THAT(result.standard_error, Not(HasSubstr("Signal 6")));
}

TEST_F(FatalSignalTest, TheErrorBeforeItStays) {
  const Result result = RunChild([] {
    write_error_file(std::make_exception_ptr(std::runtime_error("the cause")));
    sink = ReadFrom(nullptr);
  });
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGSEGV);
  ASSERT_TRUE(result.record.ok()) << result.record.status();
  EXPECT_THAT(result.record->message, HasSubstr("the cause"));
}

TEST_F(FatalSignalTest, AChildOfTheWorkerReportsNothing) {
  const Result result = RunChild([] {
    const pid_t pid = fork();
    if (pid == 0) sink = ReadFrom(nullptr);
    int status = 0;
    waitpid(pid, &status, 0);
    _exit(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV ? 0 : 1);
  });
  EXPECT_TRUE(WIFEXITED(result.wait_status) && WEXITSTATUS(result.wait_status) == 0);
  EXPECT_TRUE(absl::IsNotFound(result.record.status())) << result.record.status();
}

TEST_F(FatalSignalTest, AHandlerThatWasThereBeforeStillRuns) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/error.json");
  unlink(path.c_str());
  const pid_t pid = fork();
  if (pid == 0) {
    setenv(kErrorFileVariable, path.c_str(), 1);
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t* info, void*) {
      _exit(info->si_code == SEGV_MAPERR && info->si_addr == nullptr ? 42 : 43);
    };
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    install_fatal_signal_handlers();
    install_fatal_signal_handlers();
    sink = ReadFrom(nullptr);
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WEXITSTATUS(status), 42);
  EXPECT_TRUE(ReadErrorRecord(path).ok());
}

TEST_F(FatalSignalTest, AFileThatCannotBeWrittenChangesNothing) {
  const Result result = RunChild([] {
    setenv(kErrorFileVariable, "/nonexistent/folder/error.json", 1);
    install_fatal_signal_handlers();
    sink = ReadFrom(nullptr);
  });
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGSEGV);
  EXPECT_THAT(result.standard_error, HasSubstr("Signal 11 (SIGSEGV)"));
}

}  // namespace
}  // namespace ddp::elastic
