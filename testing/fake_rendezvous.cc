#include "testing/fake_rendezvous.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::testing {

using elastic::FailureVerdict;
using elastic::Round;

void FakeRendezvous::Answer(std::string request, std::function<void()> answer) {
  requests_.push_back(std::move(request));
  if (answers_) outstanding_ = loop_->AddTimer(absl::ZeroDuration(), std::move(answer));
}

void FakeRendezvous::Join(const elastic::NodeOffer& offer, absl::Duration, JoinDone done) {
  offers_.push_back(offer);
  Answer("join", [this, offer, done] {
    if (!reach_.ok()) return done(reach_);
    if (ended_) return done(absl::FailedPreconditionError("the job has ended"));
    ++generation_.number;
    generation_.nonce = absl::StrCat("nonce-", generation_.number);
    verdict_.reset();
    Round round;
    round.generation = generation_;
    round.restarts = restarts_;
    round.members = {{.node = "node", .group_rank = 0, .offer = offer}};
    round.store_url = absl::StrCat("unix:///fake.sock?prefix=g", generation_.number);
    done(std::move(round));
  });
}

void FakeRendezvous::ReportFailure(const Failure& failure, absl::Duration, FailureDone done) {
  Answer(absl::StrCat("report ", failure.cause), [this, failure, done] {
    if (!reach_.ok()) return done(reach_);
    if (failure.generation != generation_) {
      return done(FailureVerdict{FailureVerdict::Decision::kStale, restarts_, ""});
    }
    if (!verdict_.has_value()) {
      verdict_ = FailureVerdict{FailureVerdict::Decision::kFail, restarts_, failure.cause};
      ended_ = restarts_ >= max_restarts_;
      if (!ended_) {
        verdict_->decision = FailureVerdict::Decision::kRestart;
        verdict_->restarts = ++restarts_;
      }
    }
    done(*verdict_);
  });
}

void FakeRendezvous::Complete(const elastic::GenerationId& generation, absl::Duration, Done done) {
  Answer(absl::StrCat("complete ", generation.number), [this, generation, done] {
    if (!reach_.ok()) return done(reach_);
    if (generation != generation_ || verdict_.has_value()) {
      return done(absl::AbortedError("the generation is over"));
    }
    ended_ = true;
    done(absl::OkStatus());
  });
}

void FakeRendezvous::Leave(absl::Duration, Done done) {
  // Even one that answers nothing lets its caller go.
  answers_ = true;
  Answer("leave", [this, done] { done(reach_); });
}

void FakeRendezvous::Cancel() {
  requests_.push_back("cancel");
  loop_->CancelTimer(std::exchange(outstanding_, 0));
}

}  // namespace ddp::testing
