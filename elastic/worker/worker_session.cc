#include "elastic/worker/worker_session.h"

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "ddp/worker_environment.h"
#include "elastic/health/health_page.h"

namespace ddp::elastic {
namespace {

// One variable of a launcher is enough to expect the others.
bool LauncherIsBehindUs() {
  for (const char* name : {"RANK", "WORLD_SIZE", "DDP_STORE", kHealthFdVariable}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

[[noreturn]] void Fail(const absl::Status& status) {
  throw std::runtime_error(absl::StrCat("WorkerSession: ", status.message()));
}

// The page of this process. It is attached to the life of the thread that maps it, through a lock
// inside the page that the kernel marks at that thread's end, so it stays mapped until then: longer
// than any session. A second session of the process gets the same page.
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
  return page;
}

}  // namespace

WorkerSession WorkerSession::from_environment() {
  WorkerSession session;
  if (!LauncherIsBehindUs()) return session;
  absl::StatusOr<WorkerEnvironment> environment = WorkerEnvironment::FromEnvironment();
  if (!environment.ok()) Fail(environment.status());
  session.rank_ = environment->rank;
  session.world_size_ = environment->world_size;
  session.local_rank_ = environment->local_rank;
  session.generation_ = environment->generation;
  session.generation_nonce_ = std::move(environment->generation_nonce);
  session.restart_count_ = environment->restart_count;
  session.run_id_ = std::move(environment->run_id);
  if (environment->health_fd >= 0) session.page_ = PageOfThisProcess(environment->health_fd);
  return session;
}

void WorkerSession::commit(int64_t step) {
  if (page_ != nullptr) page_->CommitStep(step);
}

}  // namespace ddp::elastic
