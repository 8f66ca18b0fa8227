// Tests that the error file of a rank that failed because a peer did has "victim": true.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "elastic/error_file/error_record.h"
#include "elastic/worker/run_worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

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

}  // namespace
}  // namespace ddp::elastic
