#include "elastic/worker/worker_session.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "ddp/common/peer_wait.h"
#include "ddp/common/worker_environment.h"
#include "elastic/health/health_page.h"
#include "elastic/health/phase.h"

namespace ddp::elastic {
namespace {

// Returns true when any variable of a launcher is set: then all others must be set too.
bool LauncherIsBehindUs() {
  for (const char* name : {"RANK", "WORLD_SIZE", "DDP_STORE", kHealthFdVariable}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

[[noreturn]] void Fail(const absl::Status& status) {
  throw std::runtime_error(absl::StrCat("WorkerSession: ", status.message()));
}

// The thread that commits and enters phases. No other thread may write to the page.
std::atomic<pid_t> page_thread{0};

pid_t ThisThread() {
  thread_local const pid_t id = gettid();
  return id;
}

// Enters kSynchronize in the page while a collective of ddp/ blocks the thread that commits.
class PageWaits final : public PeerWaitObserver {
 public:
  explicit PageWaits(HealthPage* page) : page_(page) {}

  bool Begin() override {
    if (page_thread.load(std::memory_order_relaxed) != ThisThread()) return false;
    // A wait inside a checkpoint or an evaluation does not change the phase.
    previous_ = page_->phase();
    if (!IsPartOfStep(previous_)) return false;
    page_->TellWaits();
    page_->EnterPhase(Phase::kSynchronize);
    return true;
  }
  void End() override { page_->EnterPhase(previous_); }

 private:
  HealthPage* const page_;
  Phase previous_ = Phase::kOther;
};

// Returns the page of this process: all sessions share it. A robust lock inside the page attaches
// it to the thread that maps it; the kernel marks the lock when that thread ends. The page is
// therefore never unmapped.
HealthPage* PageOfThisProcess(int fd) {
  static Mutex mutex;
  static HealthPage* page = nullptr;
  MutexLock lock(mutex);
  if (page != nullptr) return page;
  absl::StatusOr<HealthPage> mapped = HealthPage::Map(fd);
  if (!mapped.ok()) Fail(mapped.status());
  auto owned = std::make_unique<HealthPage>(*std::move(mapped));
  const absl::Status attached = owned->Attach();
  if (!attached.ok()) Fail(attached);
  page = owned.release();
  page_thread.store(ThisThread());
  SetPeerWaitObserver(new PageWaits(page));  // lives as long as the page
  return page;
}

// The PID that sent SIGTERM. Process-wide, as a signal's handler is. Lock-free, because the handler
// may interrupt any code.
constexpr int64_t kNobody = -1;
std::atomic<int64_t> sigterm_sender{kNobody};
static_assert(std::atomic<int64_t>::is_always_lock_free);

extern "C" void OnSigterm(int /*signal*/, siginfo_t* info, void* /*context*/) {
  // The agent is our parent. A SIGTERM from the agent is kept when another sender signals later.
  const int64_t sender = info->si_code <= 0 ? info->si_pid : 0;
  if (sigterm_sender.load() == getppid()) return;
  sigterm_sender.store(sender);
}

}  // namespace

WorkerSession::PhaseScope::PhaseScope(HealthPage* page, Phase phase) : page_(page) {
  if (page_ == nullptr) return;
  page_thread.store(ThisThread(), std::memory_order_relaxed);
  previous_ = page_->phase();
  page_->EnterPhase(phase);
}

WorkerSession::PhaseScope::~PhaseScope() {
  if (page_ != nullptr) page_->EnterPhase(previous_);
}

WorkerSession WorkerSession::from_environment() {
  WorkerSession session;
  if (!LauncherIsBehindUs()) return session;
  absl::StatusOr<internal::WorkerEnvironment> environment =
      internal::WorkerEnvironment::FromEnvironment();
  if (!environment.ok()) Fail(environment.status());
  session.rank_ = environment->rank;
  session.world_size_ = environment->world_size;
  session.local_rank_ = environment->local_rank;
  session.local_world_size_ = environment->local_world_size;
  session.generation_ = environment->generation;
  session.generation_nonce_ = std::move(environment->generation_nonce);
  session.restart_count_ = environment->restart_count;
  session.max_restarts_ = environment->max_restarts;
  session.run_id_ = std::move(environment->run_id);
  session.store_url_ = std::move(environment->store_url);
  if (environment->health_fd >= 0) session.page_ = PageOfThisProcess(environment->health_fd);
  return session;
}

void WorkerSession::commit(int64_t step) {
  if (page_ == nullptr) return;
  page_thread.store(ThisThread(), std::memory_order_relaxed);
  page_->CommitStep(step);
}

void WorkerSession::progress() {
  if (page_ != nullptr) page_->Progress();
}

void WorkerSession::set_max_world_size(int64_t ranks) {
  if (page_ != nullptr) page_->SetMaxWorldSize(ranks);
}

void WorkerSession::report_save(const std::string& error) {
  if (page_ != nullptr) page_->RecordSave(error);
}

bool WorkerSession::should_stop() {
  const int64_t sender = sigterm_sender.load(std::memory_order_relaxed);
  if (page_ == nullptr) return sender != kNobody;
  return page_->ShouldStop() || (sender != kNobody && sender == getppid());
}

void WorkerSession::handle_sigterm() {
  struct sigaction action {};
  action.sa_sigaction = &OnSigterm;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGTERM, &action, nullptr) != 0) {
    throw std::runtime_error(absl::StrCat("handle_sigterm: sigaction: ", std::strerror(errno)));
  }
}

}  // namespace ddp::elastic
