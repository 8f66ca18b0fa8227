#ifndef DDP_TESTING_SIMULATOR_SIMULATED_RENDEZVOUS_H_
#define DDP_TESTING_SIMULATOR_SIMULATED_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <variant>

#include "absl/time/time.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/rendezvous_core.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "testing/simulator/bugs/core_tamper.h"
#include "testing/simulator/simulated_process.h"
#include "testing/simulator/simulated_store.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"

namespace ddp::testing {

// The real RendezvousCore over the simulated network. It replaces RedisRendezvous of a real agent.
// Thread-compatible.
class SimulatedRendezvous final : public elastic::Rendezvous {
 public:
  struct Options {
    std::string name;  // unique
    std::string host;
    // The pointers are not owned and must outlive the rendezvous.
    const Story* story = nullptr;
    SimulatedProcess* process = nullptr;
    SimulatedStore* store = nullptr;
    const elastic::RendezvousScripts* scripts = nullptr;
    const Trace* trace = nullptr;
    CoreTamper* tamper = nullptr;       // may be null
    std::function<void()> before_tick;  // before a heartbeat that may be due: calls SetReport()
    std::function<void()> after_step;   // after all consequences of an event
  };
  SimulatedRendezvous(const Options& options, uint64_t seed);

  // Ends the client: its process is gone.
  void End();
  void SetCutOff(bool cut_off) { options_.store->SetCutOff(client_, cut_off); }

  // The time of the core's next action, or of the timeout of a script without an answer.
  absl::Time next_deadline() const;
  // The token of this node's job; "" before the node knows it.
  const std::string& job() const { return job_; }
  // Returns true while consequences of an event are still to be carried out.
  bool is_stepping() const { return depth_ > 0 || answer_waits_; }

  void Ask(const elastic::RendezvousRequest& request, absl::Duration timeout, Done done) override;
  void Cancel() override;
  void SetReport(const elastic::NodeReport& report) override { core_.SetReport(report); }
  int64_t median_busy_us() const override { return core_.median_busy_us(); }
  std::optional<elastic::RankAtWork> at_work() const override { return core_.at_work(); }
  void Watch(std::function<void(const elastic::News&)> on_news) override {
    on_news_ = std::move(on_news);
  }

 private:
  using Core = elastic::RendezvousCore;

  void Step(Core::Event event);
  void Arm();
  void Do(const Core::CallScript& call);
  std::function<void(const absl::StatusOr<store::RedisReply>&)> TakeReply();
  void Do(const Core::Subscribe& subscribe);
  void Do(const Core::Answer& answer);
  void Do(const Core::Notify& notify);

  const Options options_;
  Core core_;
  const SimulatedStore::ClientId client_;
  std::function<void(const elastic::News&)> on_news_;

  Done done_;  // of the outstanding request
  uint64_t serial_ = 0;
  bool in_request_ = false;  // an answer must wait until the request has returned
  bool answer_waits_ = false;
  std::string job_;
  bool in_flight_ = false;
  int depth_ = 0;           // of nested steps
  absl::Time gives_up_at_;  // of the script in flight

  absl::Time armed_ = absl::InfiniteFuture();
  uint64_t timer_serial_ = 0;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_SIMULATED_RENDEZVOUS_H_
