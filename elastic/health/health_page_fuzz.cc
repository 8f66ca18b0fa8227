// A health page with any content: values read from it are in range, writes on top of it do not
// overflow, and the agent's detectors draw no impossible conclusion.
#include "elastic/health/health_page.h"

#include <fcntl.h>
#include <glog/logging.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "elastic/health/hang_detector.h"
#include "elastic/health/phase.h"
#include "elastic/health/straggler_detector.h"
#include "testing/fuzz_target.h"

namespace ddp::elastic {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHeadBytes = 16;  // the magic number and the version
// An input holds several states of the page, each this long. The fields end before that.
constexpr size_t kStateBytes = 512;

// A page, and its memory as a worker sees it.
struct SharedPage {
  SharedPage() : page(*HealthPage::Create()) {
    void* const mapped =
        ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, page.fd(), 0);
    PCHECK(mapped != MAP_FAILED);
    memory = static_cast<char*>(mapped);
    head.assign(memory, kHeadBytes);
  }

  void Fill(absl::string_view state, bool keep_head) {
    std::memset(memory, 0, kPageBytes);
    std::memcpy(memory, state.data(), std::min(state.size(), kPageBytes));
    if (keep_head) std::memcpy(memory, head.data(), kHeadBytes);
  }

  HealthPage page;
  char* memory = nullptr;
  std::string head;
};

SharedPage& Shared() {
  static auto* const shared = new SharedPage();
  return *shared;
}

void CheckSnapshot(const HealthPage::Snapshot& snapshot) {
  CHECK_LT(static_cast<int>(snapshot.phase), kPhaseCount);
  CHECK_GE(snapshot.commits, 0);
  CHECK_EQ(snapshot.has_step, snapshot.commits > 0);
  CHECK_GE(snapshot.longest_step_us, 0);
  for (const int64_t total_us : snapshot.phase_total_us) CHECK_GE(total_us, 0);
  CHECK(!PhaseName(snapshot.phase).empty());
}

// The detectors, with one clock.
class Watch {
 public:
  Watch() {
    hangs_.Begin(start_, 2);
    stragglers_.Begin(start_);
  }

  void Look(int local_rank, const HealthPage::Snapshot& snapshot, absl::Duration later) {
    now_ += later;
    hangs_.Observe(local_rank, snapshot, now_);
    stragglers_.Observe(local_rank, snapshot, now_);
    if (const auto hang = hangs_.Check(now_)) {
      CHECK(hang->stalled_for >= absl::ZeroDuration() && hang->stalled_for <= now_ - start_);
      CHECK(hang->longest_step >= absl::ZeroDuration() && hang->longest_step <= now_ - start_);
      CHECK(testing::IsOneLine(DescribeHang(*hang)));
    }
    for (const auto& straggler : stragglers_.Check(now_, -1)) {
      CHECK(std::isfinite(straggler.factor) && straggler.factor >= 0) << straggler.factor;
      CHECK(straggler.own >= straggler.reference) << straggler.own;
      CHECK(testing::IsOneLine(DescribeStraggler(straggler)));
    }
    CHECK_GE(stragglers_.busy_us(), -1);
  }

 private:
  const absl::Time start_ = absl::UnixEpoch() + absl::Hours(1);
  absl::Time now_ = start_;
  HangDetector hangs_{{.floor = absl::Seconds(4), .min_steps = 2}};
  StragglerDetector stragglers_{{.window = absl::Seconds(2), .windows = 1}};
};

// Acts as a worker on the page. Does not attach: the mutex of a page is trusted (health_page.cc).
void Work(HealthPage& page, uint8_t what) {
  if (what & 1) page.EnterPhase(static_cast<Phase>(what / 16 % kPhaseCount));
  if (what & 2) page.CommitStep(what);
  if (what & 4) page.Progress();
  if (what & 8) (void)page.ShouldStop();
}

}  // namespace
}  // namespace ddp::elastic

namespace ddp::testing {

// The input: two bytes (whether the head may be wrong, and the worker's actions), then states of
// the page. A state's first byte, in place of the head, gives the rank and the time since the last
// one.
void FuzzOne(absl::string_view bytes) {
  FuzzInput input(bytes);
  const bool keep_head = input.TakeByte() % 8 != 0;
  const uint8_t what = input.TakeByte();
  elastic::SharedPage& shared = elastic::Shared();
  elastic::Watch watch;
  do {
    const absl::string_view state = input.TakeBytes(elastic::kStateBytes);
    const auto first = static_cast<unsigned char>(state.empty() ? 0 : state[0]);
    shared.Fill(state, keep_head);
    const int fd = ::fcntl(shared.page.fd(), F_DUPFD_CLOEXEC, 0);
    PCHECK(fd >= 0);
    absl::StatusOr<elastic::HealthPage> page = elastic::HealthPage::Map(fd);
    if (!page.ok()) {
      CHECK(!keep_head && absl::IsInvalidArgument(page.status())) << page.status();
      CHECK(IsOneLine(page.status().message())) << page.status();
      return;
    }
    elastic::CheckSnapshot(page->Read());
    elastic::Work(*page, what);
    const elastic::HealthPage::Snapshot snapshot = page->Read();
    elastic::CheckSnapshot(snapshot);
    watch.Look(first % 4, snapshot, absl::Milliseconds(first / 4 * 200));
  } while (!input.rest().empty());
}

// Returns pages that real workers have written.
std::vector<std::string> FuzzSeeds() {
  elastic::SharedPage& shared = elastic::Shared();
  const auto state = [&shared](char first) {
    return absl::StrCat(std::string(1, first),
                        absl::string_view(shared.memory + 1, elastic::kStateBytes - 1));
  };
  shared.Fill("", /*keep_head=*/true);
  shared.page.BeginGeneration(7);
  const std::string begun = state('\x10');
  shared.page.EnterPhase(elastic::Phase::kForward);
  shared.page.CommitStep(100);
  shared.page.TellWaits();
  const std::string one_step = state('\x21');
  for (int step = 101; step < 110; ++step) {
    shared.page.EnterPhase(elastic::Phase::kBackward);
    shared.page.EnterPhase(elastic::Phase::kSynchronize);
    shared.page.CommitStep(step);
  }
  shared.page.RequestStop(105);
  (void)shared.page.ShouldStop();
  const std::string steps = state('\x81');
  return {absl::StrCat("a", std::string(1, '\0'), begun),
          absl::StrCat("a", "\xff", one_step, steps),
          absl::StrCat("a", "\x02", begun, one_step, steps, steps),
          absl::StrCat(std::string(2, '\0'), shared.head, begun.substr(elastic::kHeadBytes))};
}

}  // namespace ddp::testing
