// A minimal worker for tests of ddprun. It commits the steps 1 to STEPS of this generation to its
// health page and prints a line. It ends when its agent tells it to or when FILE appears.
//
//   stepping_worker STEPS FILE [MOST_RANKS [STEP_MS SAVE_MS]]
//
// MOST_RANKS: the largest world that it accepts. With SAVE_MS it is asked to stop between its
// steps, then saves for so long, tells the progress of that, and prints "saved".

#include <glog/logging.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "elastic/health/health_page.h"
#include "elastic/health/phase.h"

namespace {

constexpr int kPauseMs = 2;

int EnvironmentNumber(const char* name) {
  const char* text = std::getenv(name);
  int number = -1;
  CHECK(text != nullptr && absl::SimpleAtoi(text, &number)) << name;
  return number;
}

int Save(ddp::elastic::HealthPage& page, int64_t save_ms) {
  page.EnterPhase(ddp::elastic::Phase::kCheckpoint);
  constexpr int kBlockMs = 50;
  for (int64_t done_ms = 0; done_ms < save_ms; done_ms += kBlockMs) {
    ::poll(nullptr, 0, kBlockMs);
    page.Progress();
  }
  std::printf("saved\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  google::InitGoogleLogging(argv[0]);
  const auto number = [&](int index, int64_t otherwise) {
    CHECK(index >= argc || absl::SimpleAtoi(argv[index], &otherwise)) << argv[index];
    return otherwise;
  };
  CHECK_GE(argc, 3) << "usage: stepping_worker STEPS FILE [MOST_RANKS [STEP_MS SAVE_MS]]";
  const int64_t steps = number(1, 0);
  const int64_t step_ms = number(4, kPauseMs);  // without a pause the steps have no speed
  const int64_t save_ms = number(5, 0);
  absl::StatusOr<ddp::elastic::HealthPage> page =
      ddp::elastic::HealthPage::Map(EnvironmentNumber(ddp::elastic::kHealthFdVariable));
  CHECK(page.ok()) << page.status();
  CHECK(page->Attach().ok());
  if (argc > 3) page->SetMaxWorldSize(number(3, 1));
  page->EnterPhase(ddp::elastic::Phase::kForward);
  for (int64_t step = 1; step <= steps; ++step) {
    ::poll(nullptr, 0, static_cast<int>(step_ms));
    page->CommitStep(step);
    if (save_ms == 0) continue;
    if (page->ShouldStop()) return Save(*page, save_ms);
    std::printf("did step %lld\n", static_cast<long long>(step));
    std::fflush(stdout);
  }
  std::printf("rank %d is at step %lld\n", EnvironmentNumber("RANK"),
              static_cast<long long>(steps));
  std::fflush(stdout);
  while (!page->ShouldStop() && ::access(argv[2], F_OK) != 0) ::poll(nullptr, 0, kPauseMs);
  return 0;
}
