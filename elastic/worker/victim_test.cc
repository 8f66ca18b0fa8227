// Tests the victims of a peer's failure: what their error files say, and when they learn of it.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>

#include <ATen/ops/full.h>

#include "absl/strings/str_cat.h"
#include "base/death_notice.h"
#include "ddp/common/error.h"
#include "ddp/process_group.h"
#include "elastic/error_file/error_record.h"
#include "elastic/worker/fatal_signal.h"
#include "elastic/worker/run_worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/ranks/rank_test.h"

namespace ddp::elastic {
namespace {

NOT_ON_DEVICE("a death notice goes through shared memory and Gloo's connections");

using ::testing::HasSubstr;

ErrorRecord RecordOf(const std::function<int()>& body) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/error.json");
  unlink(path.c_str());
  const pid_t pid = fork();
  if (pid == 0) {
    setenv(kErrorFileVariable, path.c_str(), 1);
    dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);
    _exit(run_worker(body));
  }
  EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
  const absl::StatusOr<ErrorRecord> record = ReadErrorRecord(path);
  EXPECT_TRUE(record.ok()) << record.status();
  return record.ok() ? *record : ErrorRecord{};
}

struct Retryable {
  virtual ~Retryable() = default;
};
struct OfSeveral : Retryable, PeerFailedError {
  OfSeveral() : PeerFailedError(3, "rank 3 has ended") {}
};
struct Wrapped : PeerFailedError {
  Wrapped() : PeerFailedError(2, "rank 2 has ended") {}
};

TEST(VictimTest, APeersFailureIsMarked) {
  const ErrorRecord record =
      RecordOf([]() -> int { throw PeerFailedError(1, "rank 1 has ended"); });
  EXPECT_TRUE(record.is_victim);
  EXPECT_THAT(record.message, HasSubstr("ddp::PeerFailedError: rank 1 has ended"));
  EXPECT_TRUE(RecordOf([]() -> int { throw Wrapped(); }).is_victim);
  EXPECT_TRUE(RecordOf([]() -> int { throw OfSeveral(); }).is_victim);
}

TEST(VictimTest, AllElseIsACause) {
  EXPECT_FALSE(RecordOf([]() -> int { throw ConfigurationError("no such backend"); }).is_victim);
  EXPECT_FALSE(RecordOf([]() -> int { throw std::runtime_error("my own bug"); }).is_victim);
  EXPECT_FALSE(RecordOf([]() -> int { throw 42; }).is_victim);
}

// Stands for a core dump that takes long: the process keeps its memory, mutexes and descriptors.
void NeverEnd(void* /*context*/) {
  for (;;) pause();
}

// Rank 1 crashes in `crash`, which never returns. Rank 0 waits for rank 1 in a collective, gets the
// error while rank 1 still exists, and kills rank 1, which the harness expects.
void ExpectNoWaitFor(const std::function<void()>& crash) {
  const auto group = init_process_group();
  at::Tensor pid = at::full({1}, group->rank() == 1 ? int64_t{getpid()} : 0, at::kLong);
  group->all_reduce(pid);
  if (group->rank() == 1) crash();
  EXPECT_THROW(group->all_reduce(at::full({2}, 1.0F)), CommunicationError);
  EXPECT_EQ(kill(static_cast<pid_t>(pid.item<int64_t>()), SIGKILL), 0);
}

// A sanitizer would end the process in place of the core dump.
RANK_TEST(VictimTest, APeerThatDumpsCoreIsNotWaitedFor, .world_size = 2,
          .environment = {{"ASAN_OPTIONS", "handle_segv=0"}, {"TSAN_OPTIONS", "handle_segv=0"}},
          .killed_rank = 1) {
  install_fatal_signal_handlers();
  ExpectNoWaitFor([] {
    const DeathNotice dump(&NeverEnd, nullptr);
    raise(SIGSEGV);
  });
}

RANK_TEST(VictimTest, APeerThatDumpsCoreIsNotWaitedForOnGloo, .world_size = 2,
          .environment = {{"DDP_BACKEND", "gloo"}}, .killed_rank = 1) {
  ExpectNoWaitFor([] {
    GiveDeathNotices();
    NeverEnd(nullptr);
  });
}

}  // namespace
}  // namespace ddp::elastic
