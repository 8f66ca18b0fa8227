// Replays the stories in testing/scenarios/rendezvous over RendezvousCores and the scripts, in an
// in-memory Redis whose clock the story sets.
//
// A story (testing/story_replay.h) is a list of events. `options` sets the job's launch options.
// Below an event stand the answers and notifications that the agents get because of it:
//
//   > fail b rank=1 rank 1 was killed by SIGKILL
//   a: news: generation 1 is over: rank 1 was killed by SIGKILL
//   b: answer: restart
//
// Scripts run in no time, and so do their replies and pushes. Events:
//   join NODE [nproc=N] [role=R] [host=H] [rank=N] [timeout=D]
//   fail NODE rank=N [victim] [unprompted] [step=N] [exit=N] CAUSE
//   complete NODE   drain NODE WHY   leave NODE [in_order]   close NODE WHY
//   takeback NODE                cancel its request, then take its last report back
//   cancel NODE     report NODE step=N rate=N [busy=US] [max_world=N] [at_work=RANK]
//                               [phase=P] [for=D]
//   who NODE                     the rank at work, as the node knows
//   wait D                       time passes
//   kill NODE                    the node vanishes without a request
//   stop NODE, continue NODE     as SIGSTOP and SIGCONT do
//   lose requests|replies|SCRIPT|pushes NODE    loses all the node's requests, replies or pushes,
//   or
//                                the replies of one script
//   heal NODE                    ends all losses of the node
//   repeat NODE SCRIPT           the network delivers its last such script once more
//   store down|up|empty          out of reach, back with all data, back without data
//   store evict KEY              the server evicts a key of the first job
//   store remember|roll-back     the state that a fail-over goes back to
//   clock store|NODE +D          the clock is set
//   run NAME                     nodes that join from now on are agents of another run id
//   program [NAME]               the program of nodes that come from now on; none: any
//   show                         the store's data of the job
//
// After a change, write the new traces into the files and review the difference:
//   bazel run //elastic/rendezvous:rendezvous_scenario_test -- --rewrite
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "elastic/rendezvous/rendezvous_core.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "gtest/gtest.h"
#include "testing/simulator/redis/lua_redis.h"
#include "testing/story_replay.h"

namespace ddp::elastic {
namespace {

using Core = RendezvousCore;
using ::ddp::testing::LuaRedis;
using ::ddp::testing::MemoryDatabase;
using Words = std::vector<std::string>;

int Number(const std::string& text) {
  int number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << text;
  return number;
}

absl::Duration Duration(std::string text) {
  absl::Duration duration;
  if (absl::StartsWith(text, "+")) text = text.substr(1);
  EXPECT_TRUE(absl::ParseDuration(text, &duration)) << text;
  return duration;
}

// Takes "name=value" out of `words`.
std::optional<std::string> Take(Words& words, const std::string& name) {
  for (auto word = words.begin(); word != words.end(); ++word) {
    if (!absl::StartsWith(*word, name + "=")) continue;
    const std::string value = word->substr(name.size() + 1);
    words.erase(word);
    return value;
  }
  return std::nullopt;
}

bool TakeFlag(Words& words, const std::string& name) {
  const auto found = std::find(words.begin(), words.end(), name);
  if (found == words.end()) return false;
  words.erase(found);
  return true;
}

const RendezvousScripts& Scripts() {
  static const RendezvousScripts scripts;
  return scripts;
}

class Story final : public ::ddp::testing::StoryPlayer {
 public:
  void SetOptions(const Words& given) override {
    Words words = given;
    words.erase(words.begin());
    if (const auto value = Take(words, "min")) options_.job.limits.min_nodes = Number(*value);
    if (const auto value = Take(words, "max")) options_.job.limits.max_nodes = Number(*value);
    if (const auto value = Take(words, "max_restarts"))
      options_.job.limits.max_restarts = Number(*value);
    if (const auto value = Take(words, "last_call"))
      options_.job.rules.last_call = Duration(*value);
    if (const auto value = Take(words, "no_progress"))
      options_.job.rules.no_progress_limit = Number(*value);
    if (const auto value = Take(words, "fingerprint")) options_.job.fingerprint = *value;
    if (const auto value = Take(words, "max_node_losses"))
      options_.job.rules.max_node_losses = Number(*value);
    if (const auto value = Take(words, "scale_up_delay"))
      options_.job.rules.scale_up_delay = Duration(*value);
    if (const auto value = Take(words, "unit")) options_.job.rules.node_unit = Number(*value);
    if (const auto value = Take(words, "strikes"))
      options_.job.rules.quarantine_strikes = Number(*value);
    EXPECT_TRUE(words.empty()) << "unknown option " << words[0];
  }

  // Plays one event and returns the resulting trace.
  std::vector<std::string> Play(const Words& given) override {
    Words words = given;
    lines_.clear();
    const std::string event = words[0];
    words.erase(words.begin());
    if (event == "wait") {
      Wait(Duration(words.at(0)));
    } else if (event == "store") {
      PlayStore(words);
    } else if (event == "clock") {
      PlayClock(words);
    } else if (event == "run") {
      options_.job.run_id = words.at(0);
    } else if (event == "program") {
      options_.job.program = words.empty() ? "" : "hash " + words[0];
    } else if (event == "show") {
      Show();
    } else if (event == "lose") {
      NodeOf(words.at(1)).losses.insert(words.at(0));
    } else {
      PlayNode(event, words);
    }
    DeliverAll();
    return lines_;
  }

 private:
  struct Node {
    std::unique_ptr<Core> core;
    absl::Duration clock_offset;
    bool stopped = false;
    std::set<std::string> losses;  // as in "lose"
    std::string channel;           // subscribed
    std::map<ScriptName, Core::CallScript> last_calls;
    std::deque<Core::Event> inbox;  // events that the core has not handled yet
  };

  Node& NodeOf(const std::string& name) {
    std::unique_ptr<Node>& node = nodes_[name];
    if (node == nullptr) {
      node = std::make_unique<Node>();
      Core::Options options = options_;
      options.node = name;
      options.endpoint.host = "redis";
      for (const char c : name) options.seed = options.seed * 31 + static_cast<uint64_t>(c);
      node->core = std::make_unique<Core>(options);
    }
    return *node;
  }

  absl::Time NowOf(const Node& node) const { return now_ + node.clock_offset; }

  void PlayNode(const std::string& event, Words words) {
    const std::string name = words.at(0);
    words.erase(words.begin());
    Node& node = NodeOf(name);
    if (event == "kill") {
      nodes_.erase(name);
    } else if (event == "stop") {
      node.stopped = true;
    } else if (event == "continue") {
      node.stopped = false;
      node.inbox.push_back(Core::Tick{});
    } else if (event == "heal") {
      node.losses.clear();
    } else if (event == "repeat") {
      Repeat(node, words.at(0));
    } else if (event == "report") {
      NodeReport report;
      if (const auto value = Take(words, "step")) report.step = Number(*value);
      if (const auto value = Take(words, "rate")) report.steps_per_second = Number(*value);
      if (const auto value = Take(words, "busy")) report.busy_us = Number(*value);
      if (const auto value = Take(words, "max_world")) report.max_world_size = Number(*value);
      if (const auto value = Take(words, "at_work")) {
        report.at_work = RankAtWork{.rank = Number(*value),
                                    .phase = Take(words, "phase").value_or("evaluation"),
                                    .stalled_for = Duration(Take(words, "for").value_or("2s"))};
      }
      node.core->SetReport(report);
    } else if (event == "who") {
      const auto& work = node.core->at_work();
      lines_.push_back(work.has_value() ? absl::StrCat(name, ": rank ", work->rank, " of ",
                                                       work->host, " is in ", work->phase, " for ",
                                                       absl::FormatDuration(absl::Trunc(
                                                           work->stalled_for, absl::Seconds(1))))
                                        : absl::StrCat(name, ": nobody"));
    } else {
      if (event == "fail") reported_[name] = generations_[name];
      if (event == "takeback") Post(name, node, Core::CancelRequest{});
      Post(name, node, MakeEvent(event, name, node, words));
    }
  }

  Core::Event MakeEvent(const std::string& event, const std::string& name, Node& node,
                        Words& words) {
    constexpr absl::Duration kTimeout = absl::Minutes(10);
    if (event == "cancel") return Core::CancelRequest{};
    if (event == "join") return MakeJoin(name, words);
    if (event == "fail") return Core::Ask{MakeFailure(node, words), kTimeout};
    if (event == "complete") return Core::Ask{CompleteRequest{generations_[name]}, kTimeout};
    if (event == "takeback") return Core::Ask{TakeBackRequest{reported_[name]}, absl::Seconds(2)};
    if (event == "leave") {
      return Core::Ask{LeaveRequest{TakeFlag(words, "in_order")}, absl::Seconds(2)};
    }
    const std::string text = absl::StrJoin(words, " ");
    if (event == "close") {
      return Core::Ask{CloseRequest{{JobEnd::Kind::kClosed, text, 1}}, kTimeout};
    }
    EXPECT_EQ(event, "drain") << "unknown event";
    return Core::Ask{DrainRequest{generations_[name], text}, kTimeout};
  }

  Core::Event MakeJoin(const std::string& name, Words& words) {
    NodeOffer offer = {.nproc = 2,
                       .role = "default",
                       .host = absl::StrCat("host-", name),
                       .master_addr = absl::StrCat("10.0.0.", name),
                       .master_port = 20'000};
    absl::Duration timeout = absl::Minutes(10);
    if (const auto value = Take(words, "nproc")) offer.nproc = Number(*value);
    if (const auto value = Take(words, "role")) offer.role = *value;
    if (const auto value = Take(words, "host")) offer.host = *value;
    if (const auto value = Take(words, "rank")) offer.node_rank = Number(*value);
    if (const auto value = Take(words, "timeout")) timeout = Duration(*value);
    EXPECT_TRUE(words.empty()) << words[0];
    return Core::Ask{JoinRequest{offer}, timeout};
  }

  FailureRequest MakeFailure(Node& node, Words& words) {
    FailureRequest failure;
    failure.generation = generations_[node.core->node()];
    failure.is_victim = TakeFlag(words, "victim");
    failure.is_unprompted = TakeFlag(words, "unprompted");
    if (const auto value = Take(words, "rank")) failure.rank = Number(*value);
    if (const auto value = Take(words, "instead_of")) failure.instead_of = Number(*value);
    if (const auto value = Take(words, "exit")) failure.exit_code = Number(*value);
    if (const auto value = Take(words, "step")) {
      failure.step = Number(*value);
      failure.progress_known = true;
    }
    failure.cause = absl::StrJoin(words, " ");
    return failure;
  }

  void PlayStore(const Words& words) {
    const std::string& what = words.at(0);
    if (what == "down") {
      SetStore(false);
    } else if (what == "up") {
      SetStore(true);
    } else if (what == "empty") {
      redis_.database().Clear();
      ++server_runs_;
      SetStore(true);
    } else if (what == "evict") {
      redis_.Command({"DEL", absl::StrCat("ddp:{", options_.job.run_id, "}:i1:", words.at(1))});
    } else if (what == "remember") {
      remembered_ = redis_.database();
    } else if (what == "roll-back") {
      redis_.database() = remembered_;
      ++server_runs_;
    } else {
      ADD_FAILURE() << what;
    }
  }

  void SetStore(bool is_up) {
    store_up_ = is_up;
    for (auto& [name, node] : nodes_) {
      if (is_up || node->channel.empty()) continue;
      node->channel.clear();
      node->inbox.push_back(Core::SubscriptionEnded{});
    }
  }

  void PlayClock(const Words& words) {
    if (words.at(0) == "store") {
      server_offset_ +=
          absl::StartsWith(words.at(1), "-") ? -Duration(words[1].substr(1)) : Duration(words[1]);
    } else {
      NodeOf(words.at(0)).clock_offset += Duration(words.at(1));
    }
  }

  void Repeat(Node& node, const std::string& script) {
    for (const auto& [name, call] : node.last_calls) {
      if (ToString(name) == script) Eval(call);
    }
  }

  // Delivers events to the nodes until none is left.
  void DeliverAll() {
    for (bool busy = true; busy;) {
      busy = false;
      for (auto& [name, node] : nodes_) {
        while (!node->stopped && !node->inbox.empty()) {
          const Core::Event event = std::move(node->inbox.front());
          node->inbox.pop_front();
          Post(name, *node, event);
          busy = true;
        }
        if (!node->stopped && node->core->next_deadline() <= NowOf(*node)) {
          Post(name, *node, Core::Tick{});
          busy = true;
        }
      }
    }
  }

  void Wait(absl::Duration duration) {
    const absl::Time end = now_ + duration;
    for (;;) {
      DeliverAll();
      absl::Time next = end;
      for (const auto& [name, node] : nodes_) {
        if (node->stopped) continue;
        next = std::min(next, node->core->next_deadline() - node->clock_offset);
      }
      now_ = std::max(now_, next);
      if (now_ >= end) return;
    }
  }

  void Post(const std::string& name, Node& node, const Core::Event& event) {
    for (const Core::Action& action : node.core->Step(event, NowOf(node))) {
      std::visit([&](const auto& a) { Do(name, node, a); }, action);
    }
  }

  void Do(const std::string&, Node& node, const Core::CallScript& call) {
    node.last_calls[call.script] = call;
    Deliver(node, ToString(call.script), [&] { return Eval(call); });
  }

  void Deliver(Node& node, const char* what, const std::function<store::RedisReply()>& run) {
    const absl::Status broken = absl::UnavailableError("the connection broke");
    if (!store_up_ || node.losses.contains("requests")) {
      node.inbox.push_back(Core::Replied{broken});
      return;
    }
    store::RedisReply reply = run();
    if (node.losses.contains("replies") || node.losses.contains(what)) {
      node.inbox.push_back(Core::Replied{broken});
    } else {
      node.inbox.push_back(Core::Replied{std::move(reply)});
    }
  }

  void Do(const std::string&, Node& node, const Core::Subscribe& action) {
    const bool works = store_up_ && !node.losses.contains("pushes");
    node.channel = works ? action.channel : "";
    works ? node.inbox.push_back(Core::Subscribed{})
          : node.inbox.push_back(Core::SubscriptionEnded{});
  }

  void Do(const std::string& name, Node&, const Core::Answer& answer) {
    if (answer.answer.ok() && std::holds_alternative<Round>(*answer.answer)) {
      generations_[name] = std::get<Round>(*answer.answer).generation;
    }
    Print(name, answer);
  }
  void Do(const std::string& name, Node&, const Core::Notify& a) { Print(name, a); }

  void Print(const std::string& name, const Core::Action& action) {
    lines_.push_back(absl::StrCat(name, ": ", DebugString(action)));
  }

  store::RedisReply Eval(const Core::CallScript& call) {
    store::RedisReply reply = redis_.Eval(Scripts()[call.script], call.keys, call.args);
    EXPECT_FALSE(reply.IsError()) << ToString(call.script) << ": " << reply.error_text();
    return reply;
  }

  int64_t Publish(const std::string& channel, const std::string& text) {
    int64_t receivers = 0;
    for (auto& [name, node] : nodes_) {
      if (node->channel != channel || node->losses.contains("pushes")) continue;
      node->inbox.push_back(Core::Pushed{text});
      ++receivers;
    }
    return receivers;
  }

  std::string Text(const Words& command) { return redis_.Command(command).AsString().value_or(""); }

  Words List(const Words& command) {
    const store::RedisReply reply = redis_.Command(command);
    Words words;
    if (const auto parts = reply.AsArray(); parts.ok()) {
      for (const store::RedisReply& part : *parts) words.push_back(part.AsString().value_or("?"));
    }
    std::sort(words.begin(), words.end());
    return words;
  }

  void Show() {
    for (int instance = 1;; ++instance) {
      const std::string prefix = absl::StrCat("ddp:{", options_.job.run_id, "}:i", instance, ":");
      const auto job = [&](const char* field) { return Text({"HGET", prefix + "job", field}); };
      if (job("token").empty()) return;
      std::string line = absl::StrCat("i", instance, ": ", job("state"));
      if (job("state") == "ended") absl::StrAppend(&line, " ", job("end_kind"));
      absl::StrAppend(&line, ", generation ", job("generation"), ", restarts ", job("restarts"),
                      ", members ", absl::StrJoin(List({"HKEYS", prefix + "members"}), " "));
      const Words waiting = List({"HKEYS", prefix + "joined"});
      if (!waiting.empty()) absl::StrAppend(&line, ", waiting ", absl::StrJoin(waiting, " "));
      lines_.push_back(line);
    }
  }

  Core::Options options_ = [] {
    Core::Options options;
    options.job.run_id = "digits";
    options.job.rules.lease = absl::Seconds(3);
    options.job.rules.scale_up_delay = absl::ZeroDuration();
    return options;
  }();
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  absl::Duration server_offset_;
  bool store_up_ = true;
  int server_runs_ = 1;
  std::map<std::string, std::unique_ptr<Node>> nodes_;
  std::map<std::string, GenerationId> generations_;  // last one notified to each agent
  std::map<std::string, GenerationId> reported_;     // that each agent reported a failure of last
  MemoryDatabase remembered_;
  LuaRedis redis_{{.now_us = [this] { return absl::ToUnixMicros(now_ + server_offset_); },
                   .publish =
                       [this](std::string_view channel, std::string_view text) {
                         return Publish(std::string(channel), std::string(text));
                       },
                   .run = [this] { return server_runs_; }}};
  std::vector<std::string> lines_;
};

}  // namespace
}  // namespace ddp::elastic

int main(int argc, char** argv) {
  return ddp::testing::RunStories(
      argc, argv,
      {.name = "RendezvousScenarioTest",
       .folder = "testing/scenarios/rendezvous",
       .target = "//elastic/rendezvous:rendezvous_scenario_test",
       .make_player = [] { return std::make_unique<ddp::elastic::Story>(); }});
}
