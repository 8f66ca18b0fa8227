// A minimal worker for tests of ddprun. It commits the steps 1 to STEPS of this generation to its
// health page and prints a line. It ends when its agent tells it to or when FILE appears.
//
//   stepping_worker STEPS FILE [MOST_RANKS]
//
// MOST_RANKS: the largest world that it accepts.

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

constexpr int kStepMs = 2;

int EnvironmentNumber(const char* name) {
  const char* text = std::getenv(name);
  int number = -1;
  CHECK(text != nullptr && absl::SimpleAtoi(text, &number)) << name;
  return number;
}

}  // namespace

int main(int argc, char** argv) {
  google::InitGoogleLogging(argv[0]);
  int64_t steps = 0;
  int64_t most_ranks = 1;
  CHECK(argc >= 3 && absl::SimpleAtoi(argv[1], &steps) &&
        (argc == 3 || absl::SimpleAtoi(argv[3], &most_ranks)))
      << "usage: stepping_worker STEPS FILE [MOST_RANKS]";
  absl::StatusOr<ddp::elastic::HealthPage> page =
      ddp::elastic::HealthPage::Map(EnvironmentNumber(ddp::elastic::kHealthFdVariable));
  CHECK(page.ok()) << page.status();
  CHECK(page->Attach().ok());
  if (argc > 3) page->SetMaxWorldSize(most_ranks);
  page->EnterPhase(ddp::elastic::Phase::kForward);
  for (int64_t step = 1; step <= steps; ++step) {
    ::poll(nullptr, 0, kStepMs);  // without a pause the steps have no speed
    page->CommitStep(step);
  }
  std::printf("rank %d is at step %lld\n", EnvironmentNumber("RANK"),
              static_cast<long long>(steps));
  std::fflush(stdout);
  while (!page->ShouldStop() && ::access(argv[2], F_OK) != 0) ::poll(nullptr, 0, kStepMs);
  return 0;
}
