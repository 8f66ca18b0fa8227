#ifndef DDP_TESTING_FAKE_RENDEZVOUS_H_
#define DDP_TESTING_FAKE_RENDEZVOUS_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"

namespace ddp::testing {

// The rendezvous of a job of one node, in memory: answers in the next turn of the event loop, keeps
// the budget, and is out of reach when the test says so. Thread-compatible.
class FakeRendezvous final : public elastic::Rendezvous {
 public:
  // `loop` is not owned and must outlive the rendezvous.
  FakeRendezvous(EventLoop* loop, int max_restarts)
      : loop_(loop), max_restarts_(max_restarts) {}

  // Not OK: every request from now on is answered by it.
  void SetReach(absl::Status reach) { reach_ = std::move(reach); }
  // From now on requests are not answered at all, until they are cancelled.
  void StopAnswering() { answers_ = false; }
  // Tells the watcher, as a real one does by itself.
  void TellContact(const absl::Status& status) const { on_contact_(status); }

  void Join(const elastic::NodeOffer& offer, absl::Duration timeout, JoinDone done) override;
  void ReportFailure(const Failure& failure, absl::Duration timeout, FailureDone done) override;
  void Complete(const elastic::GenerationId& generation, absl::Duration timeout,
                Done done) override;
  void Leave(absl::Duration timeout, Done done) override;
  void Cancel() override;
  void WatchContact(Done on_contact) override { on_contact_ = std::move(on_contact); }

  // "join", "report rank 1 failed", "complete 2", "leave", "cancel".
  const std::vector<std::string>& requests() const { return requests_; }
  const std::vector<elastic::NodeOffer>& offers() const { return offers_; }

 private:
  void Answer(std::string request, std::function<void()> answer);

  EventLoop* const loop_;
  const int max_restarts_;
  absl::Status reach_;
  bool answers_ = true;
  bool ended_ = false;
  elastic::GenerationId generation_;
  int restarts_ = 0;
  std::optional<elastic::FailureVerdict> verdict_;  // of the current generation
  EventLoop::TimerId outstanding_ = 0;
  std::vector<std::string> requests_;
  std::vector<elastic::NodeOffer> offers_;
  Done on_contact_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FAKE_RENDEZVOUS_H_
