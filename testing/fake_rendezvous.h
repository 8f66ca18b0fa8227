#ifndef DDP_TESTING_FAKE_RENDEZVOUS_H_
#define DDP_TESTING_FAKE_RENDEZVOUS_H_

#include <cstdint>
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

// Implements Rendezvous in memory, for a job of one node. Answers in the next turn of the event
// loop, counts restarts against the budget, and is out of reach when the test wants that. Notifies
// its watcher by itself of two events: a drain after a drain, and the job's end after a completion.
// Thread-compatible.
class FakeRendezvous final : public elastic::Rendezvous {
 public:
  // `loop` is not owned and must outlive the rendezvous.
  FakeRendezvous(EventLoop* loop, int max_restarts) : loop_(loop), max_restarts_(max_restarts) {}

  // Makes every later request fail with `reach`. OK makes requests succeed again.
  void SetReach(absl::Status reach) { reach_ = std::move(reach); }
  // Leaves later requests unanswered until the next leave or take-back, which is answered.
  void StopAnswering() { answers_ = false; }
  // Notifies the watcher, as a real rendezvous does by itself.
  void Notify(const elastic::News& news) const { on_news_(news); }
  // Gives this node `placement` in the next rounds; by default it is the only node.
  void SetPlacement(elastic::NodePlacement placement) { placement_ = std::move(placement); }
  // Sets the result of median_busy_us().
  void SetMedianBusy(int64_t busy_us) { median_busy_us_ = busy_us; }
  // Sets the result of at_work().
  void SetAtWork(std::optional<elastic::RankAtWork> rank) { at_work_ = std::move(rank); }

  void Ask(const elastic::RendezvousRequest& request, absl::Duration timeout, Done done) override;
  void Cancel() override;
  void SetReport(const elastic::NodeReport& report) override { report_ = report; }
  int64_t median_busy_us() const override { return median_busy_us_; }
  std::optional<elastic::RankAtWork> at_work() const override { return at_work_; }
  void Watch(std::function<void(const elastic::News&)> on_news) override {
    on_news_ = std::move(on_news);
  }

  // The requests so far: "join", "report rank 1 failed", "complete 2", "drain 2 going away",
  // "take back 2", "leave", "close no program", "cancel".
  const std::vector<std::string>& requests() const { return requests_; }
  const std::vector<elastic::NodeOffer>& offers() const { return offers_; }
  const elastic::NodeReport& report() const { return report_; }

 private:
  // Records a request's name and, in the next turn, carries the request out.
  elastic::RendezvousAnswer Do(const elastic::JoinRequest& request);
  elastic::RendezvousAnswer Do(const elastic::FailureRequest& request);
  elastic::RendezvousAnswer Do(const elastic::CompleteRequest& request);
  elastic::RendezvousAnswer Do(const elastic::DrainRequest& request);
  elastic::RendezvousAnswer Do(const elastic::TakeBackRequest& request);
  elastic::RendezvousAnswer Do(const elastic::LeaveRequest& request);
  elastic::RendezvousAnswer Do(const elastic::CloseRequest& request);
  // Notifies the watcher in a later turn, as by a push.
  void NotifySoon(elastic::News news);

  EventLoop* const loop_;
  const int max_restarts_;
  absl::Status reach_;
  bool answers_ = true;
  elastic::GenerationId generation_;
  int restarts_ = 0;
  std::optional<elastic::JobEnd> end_;
  bool running_ = false;   // the current generation runs
  bool draining_ = false;  // and a membership change is announced
  std::string reason_;     // of the end of the last generation
  bool charged_ = false;
  std::optional<elastic::NodePlacement> placement_;
  int64_t median_busy_us_ = -1;
  std::optional<elastic::RankAtWork> at_work_;
  elastic::NodeReport report_;
  EventLoop::TimerId outstanding_ = 0;
  std::vector<std::string> requests_;
  std::vector<elastic::NodeOffer> offers_;
  std::function<void(const elastic::News&)> on_news_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FAKE_RENDEZVOUS_H_
