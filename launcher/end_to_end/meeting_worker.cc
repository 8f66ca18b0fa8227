// A worker for tests of ddprun. It meets all others in the store at MASTER_ADDR:MASTER_PORT, prints
// a line, and ends.
//
//   meeting_worker             # at once
//   meeting_worker fail        # the highest rank fails in the first attempt, when all have met
//   meeting_worker wait FILE   # when FILE appears

#include <glog/logging.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "store/tcp_store/tcp_store_client.h"

namespace {

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr int kLookMs = 5;

std::string Environment(const char* name) {
  const char* text = std::getenv(name);
  CHECK(text != nullptr) << name;
  return text;
}

int EnvironmentNumber(const char* name) {
  int number = -1;
  CHECK(absl::SimpleAtoi(Environment(name), &number)) << name;
  return number;
}

// Blocks until all ranks have reached the same place in the same attempt.
void Meet(ddp::store::TcpStoreClient& store, const std::string& place, int rank, int size,
          const std::string& restarts) {
  const auto set = store.Set(absl::StrCat("/", place, "/", rank), restarts, kLong);
  CHECK(set.ok()) << set;
  for (int peer = 0; peer < size; ++peer) {
    const auto attempt = store.Get(absl::StrCat("/", place, "/", peer), kLong);
    CHECK(attempt.ok()) << attempt.status();
    CHECK_EQ(*attempt, restarts) << "a key of another attempt";
  }
}

}  // namespace

int main(int argc, char** argv) {
  google::InitGoogleLogging(argv[0]);
  const std::string mode = argc > 1 ? argv[1] : "";
  const int rank = EnvironmentNumber("RANK");
  const int size = EnvironmentNumber("WORLD_SIZE");
  const std::string restarts = Environment("TORCHELASTIC_RESTART_COUNT");
  CHECK_EQ(Environment("TORCHELASTIC_USE_AGENT_STORE"), "True");
  const auto store = ddp::store::TcpStoreClient::Connect(Environment("MASTER_ADDR"),
                                                         EnvironmentNumber("MASTER_PORT"), kLong);
  CHECK(store.ok()) << store.status();
  Meet(**store, "met", rank, size, restarts);
  std::printf("%s\n", absl::StrCat("rank ", rank, " met ", size, " after ", restarts).c_str());
  std::fflush(stdout);
  Meet(**store, "told", rank, size, restarts);
  if (mode == "fail" && restarts == "0") {
    if (rank == size - 1) return 3;
    ::pause();
  }
  while (mode == "wait" && ::access(argv[2], F_OK) != 0) ::poll(nullptr, 0, kLookMs);
  return 0;
}
