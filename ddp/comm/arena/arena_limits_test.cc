// Tests an Arena under limits of resources. A limit is for good, so each case has a child.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <functional>

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "ddp/comm/arena/arena.h"

namespace ddp::internal {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Runs `child` in a forked child, and returns its result.
int InChild(const std::function<int()>& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ArenaLimitsTest, AResourceLimitMakesTheReservationSmaller) {
  EXPECT_EQ(InChild([] {
              const rlimit limit = {.rlim_cur = 1024 * kMiB, .rlim_max = 1024 * kMiB};
              setrlimit(RLIMIT_FSIZE, &limit);
              Arena arena(512 * kMiB);
              return arena.status().ok() && arena.reservation() == 512 * kMiB ? 0 : 1;
            }),
            0);
}

// `ulimit -v` is of each rank alone, and each maps the arenas of all.
TEST(ArenaLimitsTest, ALimitOfAddressesServesAllRanks) {
  for (const int ranks : {1, 2, 8, 64}) {
    EXPECT_EQ(InChild([&] {
                size_t pages = 0;
                std::ifstream("/proc/self/statm") >> pages;
                const rlim_t bytes = pages * 4096 + 1024 * kMiB;
                const rlimit limit = {.rlim_cur = bytes, .rlim_max = bytes};
                setrlimit(RLIMIT_AS, &limit);
                Arena arena(4096 * kMiB, ranks);
                if (!arena.status().ok()) return 1;
                if (arena.reservation() < 256 * kMiB / (ranks + 1)) return 2;
                for (int rank = 0; rank < ranks; ++rank) {
                  if (mmap(nullptr, arena.reservation(), PROT_READ, MAP_SHARED, arena.fd(), 0) ==
                      MAP_FAILED) {
                    return 3;
                  }
                }
                return mmap(nullptr, 400 * kMiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) ==
                               MAP_FAILED
                           ? 4
                           : 0;
              }),
              0)
        << ranks;
  }
}

TEST(ArenaLimitsTest, AnArenaThatCannotBeMadeRefusesEverything) {
  EXPECT_EQ(InChild([] {
              const rlimit limit = {.rlim_cur = 0, .rlim_max = 0};
              setrlimit(RLIMIT_FSIZE, &limit);
              Arena arena(512 * kMiB);
              if (arena.status().code() != absl::StatusCode::kUnavailable) return 1;
              if (arena.AddDemand({.gradient_bytes = {kMiB}}).status() != arena.status()) return 2;
              if (arena.Allocate(kMiB) != nullptr || arena.fd() != -1) return 3;
              int local;
              if (arena.Contains(&local, 1) || arena.Contains(nullptr, 0)) return 4;
              return arena.BlockAt(&local, kMiB).has_value() ? 5 : 0;
            }),
            0);
}

}  // namespace
}  // namespace ddp::internal
