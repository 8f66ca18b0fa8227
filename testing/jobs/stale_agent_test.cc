// A node is stopped, the job continues on another node, and the first node is continued. The test
// runs the real ddprun twice, the real trainer and a real Redis. The first node must change no
// checkpoint. Also: the job's Redis ends, and the job goes on without it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "store/redis/redis_endpoint.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::testing {
namespace {

namespace fs = std::filesystem;
using launcher::DdprunDriver;
using launcher::HeldProcess;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string Read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// Blocks until `is_so`. Returns false at the deadline. `pause_ms` passes between two checks.
bool Await(const std::function<bool()>& is_so, int pause_ms = 5) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + DdprunDriver::kDeadline;
  while (!is_so()) {
    if (clock.Now() >= deadline) return false;
    ::poll(nullptr, 0, pause_ms);
  }
  return true;
}

// Returns true when the process is stopped and takes no step before it is continued.
bool IsStopped(pid_t pid) {
  const std::string stat = Read(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && absl::StartsWith(stat.substr(name_end), ") T");
}

// A full pipe in place of a file: writes to it block until Release().
class FullPipe {
 public:
  explicit FullPipe(const fs::path& path) {
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
    fd_.reset(::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
    const std::string filling(4096, '#');
    while (::write(fd_.get(), filling.data(), filling.size()) > 0) {
    }
  }

  void Release() const {
    std::array<char, 4096> buffer;
    while (::read(fd_.get(), buffer.data(), buffer.size()) > 0) {
    }
  }

 private:
  UniqueFd fd_;
};

// Two nodes of one process each; the job needs one of them. The node of rank 0 is stopped.
class StaleAgentTest : public ::testing::Test {
 protected:
  StaleAgentTest()
      : redis_(RedisFixture::StartTcp()),
        folder_(fs::path(::testing::TempDir()) /
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder_);
    fs::create_directories(Checkpoints());
  }

  struct Node {
    std::unique_ptr<DdprunDriver> run;
    std::string event_log;
    pid_t worker = -1;  // of generation 1
  };

  // Starts both nodes and waits for their workers. The first node of the result has rank 0.
  std::vector<Node> StartJob() {
    std::vector<Node> nodes;
    for (const char* name : {"a", "b"}) {
      Node node;
      node.event_log = folder_ / absl::StrCat(name, ".events");
      DdprunDriver::Options options;
      options.arguments = {
          "--nnodes=1:2",
          absl::StrCat("--rdzv-endpoint=", redis_->endpoint().host, ":", redis_->endpoint().port),
          "--rdzv-id=stale",
          "--nproc-per-node=1",
          absl::StrCat("--event-log-file=", node.event_log),
          "testing/jobs/logging_trainer",
          "--epochs=100000",
          "--batch_size=720",
          "--checkpoint_every=1",
          "--keep_all_checkpoints",
          absl::StrCat("--checkpoint_dir=", Checkpoints().string()),
          absl::StrCat("--commit_log=", folder_.string())};
      node.run = std::make_unique<DdprunDriver>(options);
      nodes.push_back(std::move(node));
    }
    std::vector<int> ranks;
    for (Node& node : nodes) {
      EXPECT_TRUE(Await([&] { return HasEvent(node, "generation_started"); }));
      std::istringstream log(Read(node.event_log));
      for (std::string line; std::getline(log, line);) {
        const nlohmann::json event = nlohmann::json::parse(line);
        if (event["event"] != "generation_started") continue;
        EXPECT_EQ(event["generation"], 1);
        node.worker = event["pids"][0];
        ranks.push_back(event["ranks"][0]);
      }
    }
    if (ranks.at(0) != 0) std::swap(nodes[0], nodes[1]);
    return nodes;
  }

  static bool HasEvent(const Node& node, const std::string& name) {
    return absl::StrContains(Read(node.event_log), absl::StrCat("\"event\":\"", name, "\""));
  }

  fs::path Checkpoints() const { return folder_ / "checkpoints"; }

  fs::path CommitLog(int generation, int rank, int world_size) const {
    return folder_ /
           absl::StrCat("generation-", generation, "-rank-", rank, "-of-", world_size, ".txt");
  }

  // Returns the entries of the folder whose names begin with `begin` and contain `part`.
  std::vector<std::string> Entries(const std::string& begin, const std::string& part = "") const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Checkpoints())) {
      const std::string name = entry.path().filename();
      if (absl::StartsWith(name, begin) && absl::StrContains(name, part)) names.push_back(name);
    }
    return names;
  }

  size_t Saved(int generation) const {
    return Entries("step-", absl::StrCat(".g000", generation)).size();
  }

  // Returns true when generation 1 has begun a save and not committed it, and `file` is written.
  bool IsSaving(const std::string& file) const {
    for (const std::string& name : Entries(".tmp-step-", ".g0001")) {
      const fs::path work = Checkpoints() / name;
      if (fs::exists(work / file) && !fs::exists(work / "MANIFEST.json")) return true;
    }
    return false;
  }

  void Stop(pid_t pid) {
    ASSERT_EQ(::kill(pid, SIGSTOP), 0);
    stopped_.push_back(pid);
    ASSERT_TRUE(Await([pid] { return IsStopped(pid); }));
  }

  // Returns the node and its descendants, from the root on, so that no parent sees its child stop.
  void StopAll(const Node& node) {
    for (const pid_t pid : node.run->Tree()) {
      if (std::count(stopped_.begin(), stopped_.end(), pid) == 0) Stop(pid);
    }
  }

  void Continue(const std::vector<pid_t>& pids) {
    for (const pid_t pid : pids) {
      stopped_.erase(std::remove(stopped_.begin(), stopped_.end(), pid), stopped_.end());
      EXPECT_EQ(::kill(pid, SIGCONT), 0);
    }
  }

  // `refusal` is the stale worker's message about its save.
  void ContinuesUndisturbed(const Node& stale, const Node& other, const FullPipe* held_up,
                            const std::string& refusal);

  const std::unique_ptr<RedisFixture> redis_;
  const fs::path folder_;
  std::vector<pid_t> stopped_;
};

// The worker of `stale` is stopped or blocked by `held_up`. The rest of `stale` is stopped, and the
// job continues on `other`. Then the worker is continued, tries to save and ends; then its node.
void StaleAgentTest::ContinuesUndisturbed(const Node& stale, const Node& other,
                                          const FullPipe* held_up, const std::string& refusal) {
  StopAll(stale);
  const size_t saved_before = Saved(1);
  ASSERT_TRUE(Await([this] { return Saved(2) > 0; })) << Read(other.event_log);
  EXPECT_THAT(Entries(".tmp-", ".g0001"), IsEmpty());

  const HeldProcess worker(stale.worker);
  Continue({stale.worker});
  if (held_up != nullptr) held_up->Release();
  const MonotonicClock clock;
  ASSERT_TRUE(worker.AwaitEnd(clock.Now() + DdprunDriver::kDeadline));
  EXPECT_EQ(Saved(1), saved_before);
  EXPECT_THAT(Entries(".tmp-", ".g0001"), IsEmpty());
  const size_t saved_by_then = Saved(2);
  EXPECT_TRUE(Await([&] { return Saved(2) > saved_by_then + 1; })) << Read(other.event_log);

  // The node is continued, and both nodes go on.
  Continue(std::vector<pid_t>(stopped_));
  stale.run->AwaitStderr(refusal);
  EXPECT_TRUE(Await([this] { return Saved(3) > 1; })) << Read(stale.event_log);
  EXPECT_TRUE(HasEvent(stale, "evicted"));
  EXPECT_EQ(Saved(1), saved_before);
  EXPECT_THAT(Read(Checkpoints() / ".owner"), HasSubstr("\"generation\":3"));
  for (const Node* node : {&stale, &other}) {
    ASSERT_EQ(::kill(node->run->pid(), SIGTERM), 0);
    EXPECT_EQ(node->run->Wait(), 1) << node->run->err();
  }
  EXPECT_THAT(Entries("."), ElementsAre(".owner"));
  EXPECT_THAT(other.run->err(), Not(HasSubstr("not saved")));
}

TEST_F(StaleAgentTest, AWorkerThatStoodStillBeforeItsFirstClaimSavesNothing) {
  // Rank 0 writes a line for each step before the save.
  const FullPipe commit_log(CommitLog(1, 0, 2));
  const std::vector<Node> nodes = StartJob();
  ASSERT_TRUE(Await([&] { return !Read(CommitLog(1, 1, 2)).empty(); })) << Read(nodes[1].event_log);
  Stop(nodes[0].worker);
  EXPECT_THAT(Entries("."), ElementsAre(".owner"));
  ContinuesUndisturbed(nodes[0], nodes[1], &commit_log,
                       "ddp::PeerFailedError: rank 0: stopped in an all-gather");
}

TEST_F(StaleAgentTest, AWorkerThatStoodStillInASaveDoesNotCommitIt) {
  const std::vector<Node> nodes = StartJob();
  const pid_t worker = nodes[0].worker;
  ASSERT_TRUE(Await(
      [&] {
        if (!IsSaving("extra-00000.safetensors")) return false;
        Stop(worker);
        if (IsSaving("extra-00000.safetensors")) return true;
        Continue({worker});  // too late: the save is complete
        return false;
      },
      /*pause_ms=*/0));
  ASSERT_TRUE(Await([&] { return IsSaving("extra-00001.safetensors"); }));
  ContinuesUndisturbed(nodes[0], nodes[1], nullptr, "was not saved; training goes on");
}

// Steps go on while Redis is away, saves are skipped, and the save of the last step needs no Redis.
TEST_F(StaleAgentTest, AJobThatIsStoppedWhileRedisIsAwaySavesItsLastStep) {
  DdprunDriver run(
      {.arguments = {
           absl::StrCat("--rdzv-endpoint=", redis_->endpoint().host, ":", redis_->endpoint().port),
           "--rdzv-id=outage", "--nnodes=1", "--nproc-per-node=2", "testing/jobs/logging_trainer",
           "--epochs=100000", "--checkpoint_every=25",
           absl::StrCat("--checkpoint_dir=", Checkpoints().string()),
           absl::StrCat("--commit_log=", folder_.string())}});
  const auto steps = [this] {
    const std::string log = Read(CommitLog(1, 0, 2));
    return std::count(log.begin(), log.end(), '\n');
  };
  ASSERT_TRUE(Await([this] { return Saved(1) > 0; })) << run.err();
  redis_->Kill();
  run.AwaitStderr("the rendezvous is out of reach, the workers go on");
  run.AwaitStderr("(2 failed in a row)");
  const auto before = steps();
  EXPECT_TRUE(Await([&] { return steps() >= before + 50; }));
  EXPECT_THAT(Entries(".tmp-"), IsEmpty());

  ASSERT_EQ(::kill(run.pid(), SIGTERM), 0);
  EXPECT_EQ(run.Wait(), 1) << run.err();
  EXPECT_THAT(run.err(), Not(HasSubstr("SIGKILL")));
  EXPECT_TRUE(fs::exists(Checkpoints() / absl::StrFormat("step-%012d.g0001", steps())));
}

}  // namespace
}  // namespace ddp::testing
