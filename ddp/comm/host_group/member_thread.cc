#include "ddp/comm/host_group/member_thread.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp::internal {

absl::StatusOr<std::unique_ptr<MemberThread>> MemberThread::Start(
    std::shared_ptr<const Segment> segment, int member) {
  auto self = std::unique_ptr<MemberThread>(new MemberThread());
  self->thread_ = std::thread(
      [self = self.get(), segment = std::move(segment), member] { self->Live(*segment, member); });
  if (self->locked_.get_future().get() == 0) return self;
  return absl::FailedPreconditionError(
      absl::StrCat("its place is taken: two processes are rank ", member, " of the host"));
}

MemberThread::~MemberThread() { End(); }

void MemberThread::Run(std::function<void()> work) {
  has_work_ = true;
  work_.set_value(std::move(work));
}

void MemberThread::End() {
  if (ended()) return;
  if (!has_work_) Run([] {});
  thread_.join();
}

void MemberThread::Live(const Segment& segment, int member) {
  ::pthread_setname_np(::pthread_self(), "ddp-peers");
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  MemberRow& row = segment.row(member);
  const int locked = ::pthread_mutex_trylock(&row.life);
  if (locked == 0) {
    row.state.store(static_cast<uint32_t>(MemberState::kJoined), std::memory_order_seq_cst);
  }
  locked_.set_value(locked);
  if (locked != 0) return;
  work_.get_future().get()();
  row.state.store(static_cast<uint32_t>(MemberState::kLeft), std::memory_order_seq_cst);
  ::pthread_mutex_unlock(&row.life);
  segment.RingAll();
}

}  // namespace ddp::internal
