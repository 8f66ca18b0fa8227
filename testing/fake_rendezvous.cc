#include "testing/fake_rendezvous.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::testing {

using elastic::FailureVerdict;
using elastic::JobEnd;
using elastic::JoinAnswer;
using elastic::News;
using elastic::Round;

void FakeRendezvous::Answer(std::string request, std::function<void()> answer) {
  requests_.push_back(std::move(request));
  if (answers_) outstanding_ = loop_->AddTimer(absl::ZeroDuration(), std::move(answer));
}

void FakeRendezvous::Join(const elastic::NodeOffer& offer, absl::Duration, JoinDone done) {
  offers_.push_back(offer);
  Answer("join", [this, offer, done] {
    if (!reach_.ok()) return done(reach_);
    if (end_.has_value()) return done(JoinAnswer(*end_));
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
    done(JoinAnswer(std::move(round)));
  });
}

void FakeRendezvous::ReportFailure(const Failure& failure, absl::Duration, FailureDone done) {
  Answer(absl::StrCat("report ", failure.cause), [this, failure, done] {
    if (!reach_.ok()) return done(reach_);
    using Decision = FailureVerdict::Decision;
    if (failure.generation != generation_) return done(FailureVerdict{Decision::kStale, {}});
    if (running_) {
      running_ = false;
      if (!draining_) reason_ = failure.cause;
      charged_ = !draining_ && restarts_ < max_restarts_;
      if (charged_) {
        ++restarts_;
      } else if (!draining_) {
        end_ = JobEnd{JobEnd::Kind::kBudgetSpent, failure.cause};
      }
    }
    if (end_.has_value()) return done(FailureVerdict{Decision::kEnded, *end_});
    done(FailureVerdict{Decision::kRestart, {}});
  });
}

void FakeRendezvous::Complete(const elastic::GenerationId& generation, absl::Duration, Done done) {
  Answer(absl::StrCat("complete ", generation.number), [this, generation, done] {
    if (!reach_.ok()) return done(reach_);
    if (generation != generation_ || (!running_ && !end_.has_value())) {
      return done(absl::AbortedError("the generation is over"));
    }
    if (!end_.has_value()) end_ = JobEnd{JobEnd::Kind::kSucceeded, ""};
    running_ = false;
    done(absl::OkStatus());
    // The watcher is notified after the answer, as by a push.
    loop_->AddTimer(absl::ZeroDuration(), [this] {
      if (on_news_) on_news_({.kind = News::Kind::kJobEnded, .end = *end_});
    });
  });
}

void FakeRendezvous::Drain(const elastic::GenerationId& generation, const std::string& cause,
                           absl::Duration, Done done) {
  Answer(absl::StrCat("drain ", generation.number, " ", cause), [this, generation, cause, done] {
    if (!reach_.ok()) return done(reach_);
    if (generation != generation_ || !running_) {
      return done(absl::AbortedError("the generation is over"));
    }
    done(absl::OkStatus());
    if (std::exchange(draining_, true)) return;
    reason_ = cause;
    loop_->AddTimer(absl::ZeroDuration(), [this, generation, cause] {
      if (on_news_) {
        on_news_({.kind = News::Kind::kDrain, .generation = generation, .cause = cause});
      }
    });
  });
}

void FakeRendezvous::TakeBack(const elastic::GenerationId& generation, absl::Duration, Done done) {
  answers_ = true;
  Answer(absl::StrCat("take back ", generation.number), [this, done] { done(reach_); });
}

void FakeRendezvous::Leave(bool, absl::Duration, Done done) {
  // Cancel() works after StopAnswering() as well.
  answers_ = true;
  Answer("leave", [this, done] { done(reach_); });
}

void FakeRendezvous::Close(const JobEnd& end, absl::Duration, Done done) {
  Answer(absl::StrCat("close ", end.reason), [this, end, done] {
    if (!reach_.ok()) return done(reach_);
    if (!end_.has_value()) end_ = end;
    running_ = false;
    done(absl::OkStatus());
  });
}

void FakeRendezvous::Cancel() {
  requests_.push_back("cancel");
  loop_->CancelTimer(std::exchange(outstanding_, 0));
}

}  // namespace ddp::testing
