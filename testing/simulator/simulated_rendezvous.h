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
#include "testing/simulator/core_tamper.h"
#include "testing/simulator/simulated_process.h"
#include "testing/simulator/simulated_store.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"

namespace ddp::testing {

// The real RendezvousCore, and in place of its shell's sockets the simulated network: it stands
// where RedisRendezvous stands in a real agent. Thread-compatible.
class SimulatedRendezvous final : public elastic::Rendezvous {
 public:
  struct Options {
    std::string name;  // unique
    std::string host;
    // Not owned.
    const Story* story = nullptr;
    SimulatedProcess* process = nullptr;
    SimulatedStore* store = nullptr;
    const elastic::RendezvousScripts* scripts = nullptr;
    const Trace* trace = nullptr;
    CoreTamper* tamper = nullptr;       // null: there is none
    std::function<void()> before_tick;  // a heartbeat may be due: SetReport() now
    std::function<void()> after_step;   // all that followed from an event is done
  };
  SimulatedRendezvous(const Options& options, uint64_t seed);

  // The process is gone.
  void End();
  void SetCutOff(bool cut_off) { options_.store->SetCutOff(client_, cut_off); }

  // When it will do something by itself, or is told that a script was not answered.
  absl::Time next_deadline() const;
  // The token of the job that this node knows of; "" before that.
  const std::string& job() const { return job_; }
  // Whether some of what an event brought is still to be done.
  bool is_stepping() const { return depth_ > 0 || answer_waits_; }

  void Join(const elastic::NodeOffer& offer, absl::Duration timeout, JoinDone done) override;
  void ReportFailure(const Failure& failure, absl::Duration timeout, FailureDone done) override;
  void Complete(const elastic::GenerationId& generation, absl::Duration timeout,
                Done done) override;
  void Drain(const elastic::GenerationId& generation, const std::string& cause,
             absl::Duration timeout, Done done) override;
  void TakeBack(const elastic::GenerationId& generation, absl::Duration timeout,
                Done done) override;
  void Leave(absl::Duration timeout, Done done) override;
  void Close(const elastic::JobEnd& end, absl::Duration timeout, Done done) override;
  void Cancel() override;
  void SetReport(const elastic::NodeReport& report) override { core_.SetReport(report); }
  int64_t median_busy_us() const override { return core_.median_busy_us(); }
  void Watch(std::function<void(const elastic::News&)> on_news) override {
    on_news_ = std::move(on_news);
  }

 private:
  using Core = elastic::RendezvousCore;
  using Answered = std::variant<std::monostate, JoinDone, FailureDone, Done>;

  template <typename Callback>
  void Request(const Core::Event& request, Callback done);
  void Step(Core::Event event);
  void Arm();
  void Do(const Core::CallScript& call);
  void Do(const Core::CallCommand& call);
  std::function<void(const absl::StatusOr<store::RedisReply>&)> TakeReply();
  void Do(const Core::Subscribe& subscribe);
  void Do(const Core::AnswerJoin& answer) { Answer<JoinDone>(answer.answer); }
  void Do(const Core::AnswerFailure& answer) { Answer<FailureDone>(answer.verdict); }
  void Do(const Core::AnswerDone& answer) { Answer<Done>(answer.status); }
  void Do(const Core::Tell& tell);
  template <typename Callback, typename Value>
  void Answer(const Value& value);

  const Options options_;
  Core core_;
  const SimulatedStore::ClientId client_;
  std::function<void(const elastic::News&)> on_news_;

  Answered done_;  // of the outstanding request
  uint64_t serial_ = 0;
  bool in_request_ = false;  // the answer must wait until it has returned
  bool answer_waits_ = false;
  std::string job_;
  bool in_flight_ = false;
  int depth_ = 0;           // of steps that follow from steps
  absl::Time gives_up_at_;  // of the script on its way

  absl::Time armed_ = absl::InfiniteFuture();
  uint64_t timer_serial_ = 0;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_SIMULATED_RENDEZVOUS_H_
