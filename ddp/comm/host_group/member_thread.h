#ifndef DDP_COMM_HOST_GROUP_MEMBER_THREAD_H_
#define DDP_COMM_HOST_GROUP_MEMBER_THREAD_H_

#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "ddp/comm/host_group/segment.h"

namespace ddp::internal {

// The thread "ddp-peers" of a member of a HostGroup. It holds the robust mutex of the member's row
// as long as it lives, so the kernel tells the other members when the process ends: see HostGroup.
class MemberThread {
 public:
  // Takes the member's place in the segment. kFailedPrecondition: another thread has it.
  static absl::StatusOr<std::unique_ptr<MemberThread>> Start(std::shared_ptr<const Segment> segment,
                                                             int member);

  // End()
  ~MemberThread();
  MemberThread(const MemberThread&) = delete;
  MemberThread& operator=(const MemberThread&) = delete;

  // Gives the thread its work. Call it at most once.
  void Run(std::function<void()> work);

  // Blocks until the work is over and the place is left. Later calls do nothing.
  void End();
  bool ended() const { return !thread_.joinable(); }

  // Forgets the thread, which a forked child does not have.
  void Abandon() { thread_.detach(); }

  bool IsCurrent() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  MemberThread() = default;
  void Live(const Segment& segment, int member);

  bool has_work_ = false;
  std::promise<std::function<void()>> work_;
  std::promise<int> locked_;  // pthread_mutex_trylock()'s result
  std::thread thread_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_MEMBER_THREAD_H_
