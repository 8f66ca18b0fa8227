#include "testing/simulator/bugs/core_bugs.h"

#include <signal.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "elastic/agent/agent_events.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/rendezvous_core.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::testing {
namespace {

using elastic::AgentAction;
using elastic::AgentEvent;
using elastic::News;
using elastic::NewsEvent;
using elastic::ScriptName;
using elastic::SignalWorkersAction;
using elastic::WorkerExitedEvent;
using Core = elastic::RendezvousCore;

// Bug: the agent gets no news of one kind.
class Deaf final : public CoreTamper {
 public:
  explicit Deaf(News::Kind to) : to_(to) {}
  bool TellsAgent(AgentEvent& event) override {
    const auto* const news = std::get_if<NewsEvent>(&event);
    return news == nullptr || news->news.kind != to_;
  }

 private:
  const News::Kind to_;
};

// Bug: a worker counts as ended once a signal was sent to it.
class Hasty final : public CoreTamper {
 public:
  bool TellsAgent(AgentEvent& event) override {
    const auto* const exited = std::get_if<WorkerExitedEvent>(&event);
    if (exited == nullptr || exited->pid == 0 || counted_[exited->local_rank] == 0) return true;
    --counted_[exited->local_rank];
    return false;
  }
  void AfterAgent(std::vector<AgentAction>& actions, std::vector<AgentEvent>& events) override {
    for (const AgentAction& action : actions) {
      const auto* const signal = std::get_if<SignalWorkersAction>(&action);
      if (signal == nullptr || signal->signal != SIGTERM) continue;
      for (const int local_rank : signal->local_ranks) {
        WorkerExitedEvent exited;
        exited.local_rank = local_rank;
        exited.status.signal = SIGTERM;
        events.emplace_back(exited);
        ++counted_[local_rank];
      }
    }
  }

 private:
  std::map<int, int> counted_;  // local rank -> living workers that count as ended
};

class NeverKills final : public CoreTamper {
 public:
  void AfterAgent(std::vector<AgentAction>& actions, std::vector<AgentEvent>&) override {
    for (AgentAction& action : actions) {
      auto* const signal = std::get_if<SignalWorkersAction>(&action);
      if (signal != nullptr && signal->signal == SIGKILL) signal->local_ranks.clear();
    }
  }
};

// Bug: strays (processes that workers left behind) count as ended.
class ForgetsStrays final : public CoreTamper {
 public:
  void AfterAgent(std::vector<AgentAction>& actions, std::vector<AgentEvent>& events) override {
    for (const AgentAction& action : actions) {
      if (std::holds_alternative<elastic::KillStraysAction>(action)) {
        events.emplace_back(elastic::StraysGoneEvent{});
      }
    }
  }
};

// Bug: after a timeout, each request gets the answer to the request before it.
class OneAnswerBehind final : public CoreTamper {
 public:
  bool TellsRendezvous(Core::Event& event) override {
    auto* const replied = std::get_if<Core::Replied>(&event);
    if (replied == nullptr) return true;
    if (!replied->reply.ok()) {
      if (absl::IsDeadlineExceeded(replied->reply.status())) late_ = last_;
      return true;
    }
    last_ = *replied->reply;
    if (late_.has_value()) std::swap(*late_, *replied->reply);
    return true;
  }

 private:
  std::optional<store::RedisReply> last_;
  std::optional<store::RedisReply> late_;
};

// Bug: a join that is sent again offers another port.
class ChangesItsMind final : public CoreTamper {
 public:
  void AfterRendezvous(std::vector<Core::Action>& actions) override {
    for (Core::Action& action : actions) {
      auto* const call = std::get_if<Core::CallScript>(&action);
      if (call == nullptr || call->script != ScriptName::kJoin || sent_++ == 0) continue;
      std::string& offer = call->args.at(elastic::ArgumentIndex(call->script, "offer"));
      std::vector<std::string> words = absl::StrSplit(offer, absl::MaxSplits(' ', 2));
      int port = 0;
      if (!absl::SimpleAtoi(words.at(1), &port)) continue;
      words[1] = absl::StrCat(port % 65535 + 1);
      offer = absl::StrJoin(words, " ");
    }
  }

 private:
  int sent_ = 0;
};

// Bug: a heartbeat whose answer is lost is the last one.
class GivesUpBeating final : public CoreTamper {
 public:
  bool TellsRendezvous(Core::Event& event) override {
    const auto* const replied = std::get_if<Core::Replied>(&event);
    return replied == nullptr || replied->reply.ok() || !is_heartbeat_;
  }
  void AfterRendezvous(std::vector<Core::Action>& actions) override {
    for (const Core::Action& action : actions) {
      const auto* const call = std::get_if<Core::CallScript>(&action);
      if (call != nullptr) is_heartbeat_ = call->script == ScriptName::kHeartbeat;
    }
  }

 private:
  bool is_heartbeat_ = false;
};

// Bug: the node does not present the generations that it has seen to a server that lost them.
class TellsNoGeneration final : public CoreTamper {
 public:
  void AfterRendezvous(std::vector<Core::Action>& actions) override {
    for (Core::Action& action : actions) {
      auto* const call = std::get_if<Core::CallScript>(&action);
      if (call != nullptr && call->script != ScriptName::kOpenInstance)
        call->args.at(elastic::ArgumentIndex(call->script, "seen_generation")) = "0";
    }
  }
};

template <typename Tamper, typename... Args>
std::function<std::unique_ptr<CoreTamper>()> Make(Args... args) {
  return [args...] { return std::make_unique<Tamper>(args...); };
}

}  // namespace

std::vector<PlantedBug> CoreBugs() {
  return {
      {.name = "no_fence",
       .what = "an agent that was given up for lost lets its workers run on",
       .symptom = "waits without a deadline",
       .make_tamper = Make<Deaf>(News::Kind::kEvicted)},
      {.name = "deaf_to_over",
       .what = "an agent does not stop its workers when another node has failed or was lost",
       .symptom = "no generation runs",
       .make_tamper = Make<Deaf>(News::Kind::kGenerationOver)},
      {.name = "two_at_once",
       .what = "an agent starts the next generation's workers while the last ones still end",
       .symptom = "workers of generation",
       .make_tamper = Make<Hasty>()},
      {.name = "never_kill",
       .what = "an agent sends no SIGKILL to workers that ignore SIGTERM",
       .symptom = "did not end by SIGKILL",
       .make_tamper = Make<NeverKills>()},
      {.name = "strays_live",
       .what = "an agent starts the next generation's workers while it still kills what the last "
               "ones left behind",
       .symptom = "left behind lives",
       .make_tamper = Make<ForgetsStrays>()},
      {.name = "late_answer",
       .what = "an answer that came too late is taken for that of the next request",
       .symptom = "nobody closed it",
       .make_tamper = Make<OneAnswerBehind>()},
      {.name = "new_offer",
       .what = "a join that is sent again offers another port",
       .symptom = "offered port",
       .make_tamper = Make<ChangesItsMind>()},
      {.name = "last_heartbeat",
       .what = "a heartbeat whose answer is lost is not repeated",
       .symptom = "waits without a deadline",
       .make_tamper = Make<GivesUpBeating>()},
      {.name = "no_memory",
       .what = "an agent does not tell the server which generations it has seen",
       .symptom = "was given generation",
       .make_tamper = Make<TellsNoGeneration>()},
  };
}

}  // namespace ddp::testing
