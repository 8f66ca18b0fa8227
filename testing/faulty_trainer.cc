// A trainer without a model, for tests of the launcher's reaction to faults:
//
//   faulty_trainer FAULT
//
// The first generation makes some steps. Then rank 1 has the fault, and the other ranks wait for
// it, as for a peer that is gone. A later generation makes some steps and succeeds.
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "elastic/health/phase.h"
#include "elastic/worker/run_worker.h"
#include "elastic/worker/worker_session.h"

namespace {

using ddp::elastic::Phase;
using ddp::elastic::WorkerSession;

constexpr int64_t kSteps = 20;  // more than hang detection needs for its warm-up

// Blocks until the process is killed.
[[noreturn]] void WaitIn(WorkerSession& session, Phase phase) {
  const auto scope = session.phase(phase);
  for (;;) pause();
}

int Train(const std::string& fault) {
  WorkerSession session = WorkerSession::from_environment();
  for (int64_t step = 1; step <= kSteps; ++step) session.commit(step);
  if (session.is_restart()) return 0;
  if (session.rank() != 1) WaitIn(session, Phase::kBackward);
  if (fault == "hang") WaitIn(session, Phase::kForward);
  if (fault == "segv") *reinterpret_cast<volatile int*>(std::uintptr_t{0x10}) = 1;
  throw std::invalid_argument("no such fault: " + fault);
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::elastic::run_worker([&] { return Train(argc > 1 ? argv[1] : ""); });
}
