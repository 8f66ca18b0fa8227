#include "testing/fake_rendezvous.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::testing {

using elastic::FailureVerdict;
using elastic::JobEnd;
using elastic::News;
using elastic::RendezvousAnswer;
using elastic::Round;

namespace {

RendezvousAnswer Nothing() { return elastic::AnswerOf(absl::OkStatus()); }

RendezvousAnswer GenerationIsOver() { return absl::AbortedError("the generation is over"); }

std::string Name(const elastic::JoinRequest&) { return "join"; }
std::string Name(const elastic::FailureRequest& r) { return absl::StrCat("report ", r.cause); }
std::string Name(const elastic::CompleteRequest& r) {
  return absl::StrCat("complete ", r.generation.number);
}
std::string Name(const elastic::DrainRequest& r) {
  return absl::StrCat("drain ", r.generation.number, " ", r.cause);
}
std::string Name(const elastic::TakeBackRequest& r) {
  return absl::StrCat("take back ", r.generation.number);
}
std::string Name(const elastic::LeaveRequest&) { return "leave"; }
std::string Name(const elastic::CloseRequest& r) { return absl::StrCat("close ", r.end.reason); }

}  // namespace

void FakeRendezvous::Ask(const elastic::RendezvousRequest& request, absl::Duration,
                         Rendezvous::Done done) {
  requests_.push_back(std::visit([](const auto& r) { return Name(r); }, request));
  if (const auto* join = std::get_if<elastic::JoinRequest>(&request))
    offers_.push_back(join->offer);
  // Cancel() works after StopAnswering() as well.
  if (std::holds_alternative<elastic::LeaveRequest>(request) ||
      std::holds_alternative<elastic::TakeBackRequest>(request)) {
    answers_ = true;
  }
  if (!answers_) return;
  outstanding_ = loop_->AddTimer(absl::ZeroDuration(), [this, request, done = std::move(done)] {
    done(reach_.ok() ? std::visit([this](const auto& r) { return Do(r); }, request)
                     : RendezvousAnswer(reach_));
  });
}

RendezvousAnswer FakeRendezvous::Do(const elastic::JoinRequest& request) {
  if (end_.has_value()) return *end_;
  const elastic::NodeOffer& offer = request.offer;
  ++generation_.number;
  generation_.nonce = absl::StrCat("nonce-", generation_.number);
  running_ = true;
  draining_ = false;
  Round round;
  round.generation = generation_;
  round.restarts = restarts_;
  round.placement = placement_.value_or(elastic::NodePlacement{.group_rank = 0,
                                                               .group_world_size = 1,
                                                               .local_world_size = offer.nproc,
                                                               .first_rank = 0,
                                                               .world_size = offer.nproc,
                                                               .first_role_rank = 0,
                                                               .role_world_size = offer.nproc,
                                                               .master_addr = offer.master_addr,
                                                               .master_port = offer.master_port});
  round.store_url = absl::StrCat("unix:///fake.sock?prefix=g", generation_.number);
  round.reason = std::exchange(reason_, "");
  round.charged = std::exchange(charged_, false);
  return round;
}

RendezvousAnswer FakeRendezvous::Do(const elastic::FailureRequest& request) {
  using Decision = FailureVerdict::Decision;
  if (request.generation != generation_) return FailureVerdict{Decision::kStale, {}};
  if (running_) {
    running_ = false;
    if (!draining_) reason_ = request.cause;
    charged_ = !draining_ && restarts_ < max_restarts_;
    if (charged_) {
      ++restarts_;
    } else if (!draining_) {
      end_ = JobEnd{JobEnd::Kind::kBudgetSpent, request.cause};
    }
  }
  if (end_.has_value()) return FailureVerdict{Decision::kEnded, *end_};
  return FailureVerdict{Decision::kRestart, {}};
}

RendezvousAnswer FakeRendezvous::Do(const elastic::CompleteRequest& request) {
  if (request.generation != generation_ || (!running_ && !end_.has_value())) {
    return GenerationIsOver();
  }
  if (!end_.has_value()) end_ = JobEnd{JobEnd::Kind::kSucceeded, ""};
  running_ = false;
  NotifySoon({.kind = News::Kind::kJobEnded, .end = *end_});
  return Nothing();
}

RendezvousAnswer FakeRendezvous::Do(const elastic::DrainRequest& request) {
  if (request.generation != generation_ || !running_) return GenerationIsOver();
  if (std::exchange(draining_, true)) return Nothing();
  reason_ = request.cause;
  NotifySoon(
      {.kind = News::Kind::kDrain, .generation = request.generation, .cause = request.cause});
  return Nothing();
}

RendezvousAnswer FakeRendezvous::Do(const elastic::TakeBackRequest&) { return Nothing(); }

RendezvousAnswer FakeRendezvous::Do(const elastic::LeaveRequest&) { return Nothing(); }

RendezvousAnswer FakeRendezvous::Do(const elastic::CloseRequest& request) {
  if (!end_.has_value()) end_ = request.end;
  running_ = false;
  return Nothing();
}

void FakeRendezvous::NotifySoon(News news) {
  loop_->AddTimer(absl::ZeroDuration(), [this, news = std::move(news)] {
    if (on_news_) on_news_(news);
  });
}

void FakeRendezvous::Cancel() {
  requests_.push_back("cancel");
  loop_->CancelTimer(std::exchange(outstanding_, 0));
}

}  // namespace ddp::testing
