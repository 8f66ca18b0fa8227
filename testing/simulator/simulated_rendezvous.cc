#include "testing/simulator/simulated_rendezvous.h"

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::testing {
namespace {

using elastic::RendezvousCore;
using store::RedisReply;

constexpr int64_t kReplyTimeoutUs = 2000000;

RendezvousCore::Options CoreOptions(const SimulatedRendezvous::Options& options, uint64_t seed) {
  const Story& story = *options.story;
  RendezvousCore::Options core;
  core.job = JobOf(story);
  core.node = options.name;
  core.endpoint.host = "store";
  core.seed = seed;
  return core;
}

std::string Show(const absl::StatusOr<RedisReply>& reply) {
  if (!reply.ok()) return reply.status().ToString();
  const auto parts = reply->AsArray();
  if (!parts.ok()) return reply->DebugString();
  std::string text;
  for (const RedisReply& part : *parts) {
    absl::StrAppend(&text, part.AsString().value_or(part.DebugString()), "|");
  }
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

}  // namespace

SimulatedRendezvous::SimulatedRendezvous(const Options& options, uint64_t seed)
    : options_(options),
      core_(CoreOptions(options, seed)),
      client_(options.store->AddClient(options.name)) {}

void SimulatedRendezvous::End() { options_.store->RemoveClient(client_); }

absl::Time SimulatedRendezvous::next_deadline() const {
  return in_flight_ ? std::min(gives_up_at_, core_.next_deadline()) : core_.next_deadline();
}

void SimulatedRendezvous::Step(Core::Event event) {
  ++depth_;
  CoreTamper* const tamper = options_.tamper;
  std::vector<Core::Action> actions;
  if (tamper == nullptr || tamper->TellsRendezvous(event)) {
    actions = core_.Step(event, options_.process->now());
  }
  if (tamper != nullptr) tamper->AfterRendezvous(actions);
  for (const Core::Action& action : actions) {
    if (options_.trace->on()) options_.trace->Add(options_.name, DebugString(action));
    std::visit([this](const auto& a) { Do(a); }, action);
  }
  Arm();
  if (--depth_ == 0) options_.after_step();
}

void SimulatedRendezvous::Arm() {
  const absl::Time next = core_.next_deadline();
  if (next == armed_) return;
  armed_ = next;
  const uint64_t serial = ++timer_serial_;
  if (next == absl::InfiniteFuture()) return;
  options_.process->DeliverAt(next, [this, serial] {
    if (serial != timer_serial_) return;
    armed_ = absl::InfiniteFuture();
    options_.before_tick();
    Step(Core::Tick{});
  });
}

void SimulatedRendezvous::Do(const Core::CallScript& call) {
  in_flight_ = true;
  if (call.script != elastic::ScriptName::kOpenInstance) {
    job_ = call.args.at(elastic::ArgumentIndex(call.script, "token"));
  }
  gives_up_at_ = options_.process->now() + absl::Microseconds(kReplyTimeoutUs);
  options_.store->Call(client_, (*options_.scripts)[call.script], call.keys, call.args,
                       kReplyTimeoutUs, TakeReply());
}

std::function<void(const absl::StatusOr<RedisReply>&)> SimulatedRendezvous::TakeReply() {
  return [this](const absl::StatusOr<RedisReply>& reply) {
    options_.process->Deliver([this, reply] {
      in_flight_ = false;
      if (options_.trace->on()) options_.trace->Add(options_.name, "<- " + Show(reply));
      Step(Core::Replied{reply});
    });
  };
}

void SimulatedRendezvous::Do(const Core::Subscribe& subscribe) {
  SimulatedProcess* const process = options_.process;
  options_.store->Subscribe(
      client_, subscribe.channel,
      [this, process](const std::string& text) {
        process->Deliver([this, text] { Step(Core::Pushed{text}); });
      },
      [this, process] { process->Deliver([this] { Step(Core::Subscribed{}); }); },
      [this, process] { process->Deliver([this] { Step(Core::SubscriptionEnded{}); }); });
}

void SimulatedRendezvous::Do(const Core::Notify& notify) {
  if (on_news_) on_news_(notify.news);
}

void SimulatedRendezvous::Do(const Core::Answer& answer) {
  if (in_request_) {
    answer_waits_ = true;
    options_.process->DeliverAt(options_.process->now(), [this, serial = serial_, answer] {
      if (serial != serial_) return;
      answer_waits_ = false;
      Do(answer);
    });
    return;
  }
  std::exchange(done_, nullptr)(answer.answer);
}

void SimulatedRendezvous::Ask(const elastic::RendezvousRequest& request, absl::Duration timeout,
                              Done done) {
  done_ = std::move(done);
  ++serial_;
  const bool nested = std::exchange(in_request_, true);
  Step(Core::Ask{request, timeout});
  in_request_ = nested;
}

void SimulatedRendezvous::Cancel() {
  answer_waits_ = false;
  done_ = nullptr;
  ++serial_;
  Step(Core::CancelRequest{});
}

}  // namespace ddp::testing
