// Replays the stories in testing/scenarios/agent over an AgentCore.
//
// A story (testing/story_replay.h) is a list of events. `options` sets the agent's launch options.
// Below an event stand the decisions of the core:
//
//   > exit 1 signal 9
//   send SIGTERM to local ranks 0
//   report rank 1 within 10m: rank 1 was killed by SIGKILL
//   deadline in 200ms
//
// After a change of the core, write the new decisions into the files and review the difference:
//   bazel run //elastic/agent:agent_core_test -- --rewrite
#include "elastic/agent/agent_core.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "elastic/agent/agent_events.h"
#include "elastic/agent/job_result.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/job/job_spec.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "gtest/gtest.h"
#include "testing/story_replay.h"

namespace ddp::elastic {
namespace {

// A player of one story.
class Story final : public ::ddp::testing::StoryPlayer {
 public:
  // Handles "options nproc=2 max_restarts=1", for later events.
  void SetOptions(const Words& words) override {
    for (size_t i = 1; i < words.size(); ++i) {
      const std::vector<std::string> parts = absl::StrSplit(words[i], '=');
      ASSERT_EQ(parts.size(), 2u) << words[i];
      if (parts[0] == "nproc") {
        nproc_ = Number(parts[1]);
      } else if (parts[0] == "nodes") {
        nodes_ = job_.limits.max_nodes = Number(parts[1]);
      } else if (parts[0] == "max_restarts") {
        job_.limits.max_restarts = Number(parts[1]);
      } else if (parts[0] == "shutdown_timeout") {
        job_.times.shutdown_timeout = Duration(parts[1]);
      } else if (parts[0] == "termination_grace") {
        job_.times.termination_grace = Duration(parts[1]);
      } else if (parts[0] == "slow_strays") {
        slow_strays_ = Number(parts[1]) != 0;
      } else {
        FAIL() << "unknown option " << parts[0];
      }
    }
  }

  // Plays "exit 1 signal 9" and returns the lines of the core's decision.
  std::vector<std::string> Play(const Words& words) override {
    if (words[0] == "wait") {
      now_ += Duration(words.at(1));
      return now_ < core().next_deadline() ? std::vector<std::string>() : Step(TickEvent{});
    }
    return Step(MakeEvent(words));
  }

 private:
  static int Number(const std::string& text) {
    int number = 0;
    EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << text;
    return number;
  }

  static absl::Duration Duration(const std::string& text) {
    absl::Duration duration;
    EXPECT_TRUE(absl::ParseDuration(text, &duration)) << text;
    return duration;
  }

  static int Signal(const std::string& name) {
    for (int signal = 1; signal < 32; ++signal) {
      if (SignalName(signal) == name) return signal;
    }
    ADD_FAILURE() << "unknown signal " << name;
    return 0;
  }

  AgentCore& core() {
    if (!core_.has_value()) core_.emplace(job_, "here");
    return *core_;
  }

  // "round": the first round, or the one after the last verdict. "round free node b was lost",
  // "round charged rank 3 exited with code 1": another node caused the round.
  Round NextRound(const std::vector<std::string>& words) {
    Round round;
    round.generation = {.number = ++generation_, .nonce = "n"};
    round.reason = std::exchange(restart_reason_, std::string());
    round.charged = !round.reason.empty();
    if (words.size() > 1) {
      round.charged = words[1] == "charged";
      round.reason = From(words, 2);
    }
    if (round.charged) ++restarts_;
    round.restarts = restarts_;
    round.placement = {.group_rank = 0,
                       .group_world_size = nodes_,
                       .local_world_size = nproc_,
                       .world_size = nproc_ * nodes_,
                       .role_world_size = nproc_ * nodes_,
                       .master_addr = "127.0.0.1",
                       .master_port = 20'000};
    return round;
  }

  static std::string From(const std::vector<std::string>& words, size_t first) {
    if (words.size() <= first) return "";
    return absl::StrJoin(words.begin() + static_cast<std::ptrdiff_t>(first), words.end(), " ");
  }

  // The answer to a request: "completed", "completed unreachable", "completed stale".
  static absl::Status Answer(const std::vector<std::string>& words) {
    if (words.back() == "unreachable") return absl::UnavailableError("Redis is out of reach");
    if (words.back() == "stale") return absl::AbortedError("the generation is over");
    if (words.back() == "late") return absl::DeadlineExceededError("only 1 of 2 nodes came");
    return absl::OkStatus();
  }

  // "budget rank 1 exited with code 3", "budget@b rank 1 exited with code 3" on host b
  static JobEnd MakeEnd(const std::vector<std::string>& words, size_t first) {
    JobEnd end;
    const std::vector<std::string> parts = absl::StrSplit(words.at(first), '@');
    const std::string& kind = parts[0];
    if (parts.size() > 1) end.host = parts[1];
    end.kind = kind == "succeeded"    ? JobEnd::Kind::kSucceeded
               : kind == "budget"     ? JobEnd::Kind::kBudgetSpent
               : kind == "noprogress" ? JobEnd::Kind::kNoProgress
                                      : JobEnd::Kind::kClosed;
    end.reason = From(words, first + 1);
    return end;
  }

  std::optional<NewsEvent> MakeNews(const std::vector<std::string>& words) const {
    News news;
    news.generation = {.number = generation_, .nonce = "n"};
    news.cause = From(words, 1);
    const std::string& event = words[0];
    if (event == "over") {
      news.kind = News::Kind::kGenerationOver;
    } else if (event == "old") {  // of the previous generation
      news.kind = News::Kind::kGenerationOver;
      --news.generation.number;
    } else if (event == "drain") {
      news.kind = News::Kind::kDrain;
      news.stop_at_step = Number(words.at(1));
      news.cause = From(words, 2);
    } else if (event == "evicted") {
      news.kind = News::Kind::kEvicted;
    } else if (event == "job") {
      news.kind = News::Kind::kJobEnded;
      news.end = MakeEnd(words, 1);
    } else if (event == "waiting") {
      news.kind = News::Kind::kWaiting;
    } else if (event == "lost") {
      news.kind = News::Kind::kOutOfReach;
      news.for_good = news.cause == "refused for good";
    } else if (event == "back") {
      news.kind = News::Kind::kBackInReach;
    } else {
      return std::nullopt;
    }
    return NewsEvent{news};
  }

  AgentEvent MakeEvent(const std::vector<std::string>& words) {
    const std::string& event = words[0];
    if (event == "start") return StartEvent{};
    if (event == "round") {
      const absl::Status answer = Answer(words);
      if (!answer.ok()) return AnsweredEvent{JoinRequest{}, answer};
      return AnsweredEvent{JoinRequest{}, NextRound(words)};
    }
    if (event == "ended") return AnsweredEvent{JoinRequest{}, MakeEnd(words, 1)};
    if (event == "started") {
      WorkersStartedEvent started;
      const int count = words.size() > 1 ? Number(words[1]) : nproc_;
      for (int i = 0; i < count; ++i) started.started.push_back(i);
      if (count < nproc_ && words.back() != "cut") {
        started.status = words.back() == "full" ? absl::ResourceExhaustedError("the disk is full")
                         : words.back() == "refused"
                             ? absl::UnimplementedError("memfd_create: not permitted")
                             : absl::NotFoundError("there is no program ./train");
      }
      return started;
    }
    if (event == "gone") return StraysGoneEvent{};
    if (event == "step") {
      return StepEvent{words.size() > 1 ? Duration(words[1]) : absl::ZeroDuration()};
    }
    if (event == "stuck") {
      return WorkerStuckEvent{.local_rank = Number(words.at(1)),
                              .pid = 100 + Number(words.at(1)),
                              .what = "was in uninterruptible sleep",
                              .wall_time = {}};
    }
    if (event == "progress") return ProgressEvent{};
    if (event == "ending") {
      return EndingEvent{"rank 1 (pid 101) is in uninterruptible sleep (state D)",
                         words.back() == "progress"};
    }
    if (event == "exit") return MakeExit(words);
    if (event == "hung") {
      return WorkerHungEvent{.local_rank = Number(words.at(1)),
                             .pid = 100 + Number(words.at(1)),
                             .what = "made no step for 42s",
                             .wall_time = {},
                             .is_victim = words.back() == "victim"};
    }
    if (event == "verdict") return MakeVerdict(words);
    if (event == "completed") return AnsweredEvent{CompleteRequest{}, AnswerOf(Answer(words))};
    if (event == "drained") return AnsweredEvent{DrainRequest{}, AnswerOf(Answer(words))};
    if (event == "closed") return AnsweredEvent{CloseRequest{}, AnswerOf(Answer(words))};
    if (event == "keeper") return KeeperGoneEvent{};
    if (event == "takenback") return AnsweredEvent{TakeBackRequest{}, AnswerOf(Answer(words))};
    if (event == "left") return AnsweredEvent{LeaveRequest{}, AnswerOf(Answer(words))};
    if (event == "signal") return SignalEvent{Signal(words.at(1))};
    if (std::optional<NewsEvent> news = MakeNews(words); news.has_value()) return *news;
    ADD_FAILURE() << "unknown event " << event;
    return TickEvent{};
  }

  // "exit 1 code 3", "exit 0 signal 9 victim", "exit 0 code 0 asked", "exit 0 code 1 file 100",
  // where 100 is the second in its error file.
  static AgentEvent MakeExit(const std::vector<std::string>& words) {
    WorkerExitedEvent exited;
    exited.local_rank = Number(words.at(1));
    exited.pid = 100 + exited.local_rank;
    (words.at(2) == "signal" ? exited.status.signal : exited.status.exit_code) =
        Number(words.at(3));
    exited.is_victim = words.back() == "victim";
    exited.stopped_as_asked = words.back() == "asked";
    exited.is_unprompted = words.back() == "unprompted";
    if (words.size() > 5 && words.at(4) == "file") {
      exited.said_at = absl::FromUnixSeconds(Number(words.at(5)));
    }
    return exited;
  }

  AgentEvent MakeVerdict(const std::vector<std::string>& words) {
    const std::string& decision = words.at(1);
    FailureVerdict verdict;
    if (decision == "unreachable") return AnsweredEvent{FailureRequest{}, Answer(words)};
    if (decision == "restart") {
      verdict.decision = FailureVerdict::Decision::kRestart;
      restart_reason_ = From(words, 2);
    } else if (decision == "stale") {
      verdict.decision = FailureVerdict::Decision::kStale;
    } else {
      verdict.decision = FailureVerdict::Decision::kEnded;
      verdict.end = MakeEnd(words, 1);
    }
    return AnsweredEvent{FailureRequest{}, verdict};
  }

  std::vector<std::string> Step(const AgentEvent& event) {
    const absl::Time deadline_before = core().next_deadline();
    std::vector<std::string> lines;
    bool finished = false;
    bool strays = false;
    const auto take = [&](const AgentEvent& e) {
      const AgentCore::Decision decision = core().Step(e, now_);
      if (!decision.reason.empty()) lines.push_back(absl::StrCat("say: ", decision.reason));
      strays = false;
      for (const AgentAction& action : decision.actions) {
        lines.push_back(DebugString(action));
        finished |= std::holds_alternative<FinishAction>(action);
        strays |= std::holds_alternative<KillStraysAction>(action);
      }
    };
    take(event);
    // By default no process of a worker takes time to kill.
    if (strays && !slow_strays_) take(StraysGoneEvent{});
    if (core().next_deadline() != deadline_before) {
      lines.push_back(
          core().next_deadline() == absl::InfiniteFuture()
              ? "no deadline"
              : absl::StrCat("deadline in ", absl::FormatDuration(core().next_deadline() - now_)));
    }
    if (finished) {
      const JobResult result = core().result();
      EXPECT_EQ(result.exit_code == 0, result.reason.empty());
      if (!result.reason.empty()) lines.push_back(absl::StrCat("reason: ", result.reason));
      for (const WorkerFailure& failure : result.failures) {
        lines.push_back(absl::StrCat(failure.was_stopped ? "stopped: rank " : "failure: rank ",
                                     failure.rank, " ", DescribeFailure(failure), ", pid ",
                                     failure.pid));
      }
      if (!result.cause_elsewhere.empty()) {
        lines.push_back(absl::StrCat("cause elsewhere",
                                     result.cause_host.empty() ? "" : " on " + result.cause_host,
                                     ": ", result.cause_elsewhere));
      }
      if (result.root_exit_code != 0) {
        lines.push_back(absl::StrCat("code of the cause: ", result.root_exit_code));
      }
    }
    return lines;
  }

  JobSpec job_;
  int nproc_ = 1;
  int nodes_ = 1;
  std::optional<AgentCore> core_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  uint64_t generation_ = 0;
  int restarts_ = 0;
  bool slow_strays_ = false;    // they end with "> gone"
  std::string restart_reason_;  // of the round after the last verdict
};

}  // namespace
}  // namespace ddp::elastic

int main(int argc, char** argv) {
  return ddp::testing::RunStories(
      argc, argv,
      {.name = "AgentCoreTest",
       .folder = "testing/scenarios/agent",
       .target = "//elastic/agent:agent_core_test",
       .make_player = [] { return std::make_unique<ddp::elastic::Story>(); }});
}
