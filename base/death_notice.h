#ifndef DDP_BASE_DEATH_NOTICE_H_
#define DDP_BASE_DEATH_NOTICE_H_

#include <atomic>

namespace ddp {

// A function that tells others of the end of this process before the process has ended.
//
// A process that dumps core holds its robust mutexes, its sockets and its pidfd until the dump is
// written, which takes minutes for a large one. Peers that watch those would wait as long. The
// handler of a fatal signal therefore calls GiveDeathNotices() before the dump.
//
// The constructor registers the function, for the life of the object. At most kMost functions are
// registered in a process at one time; a further one is not called, and its peers learn of the end
// from the kernel.
//
// Threads: any. The function runs in a signal handler: it may call only what signal-safety(7)
// allows, and may not wait. The destructor waits while notices are given on another thread.
class DeathNotice {
 public:
  static constexpr int kMost = 1024;

  DeathNotice(void (*tell)(void* context), void* context);
  ~DeathNotice();
  DeathNotice(const DeathNotice&) = delete;
  DeathNotice& operator=(const DeathNotice&) = delete;

 private:
  struct Slot;
  static Slot slots_[kMost];
  static std::atomic<int> giving_;
  friend void GiveDeathNotices();

  Slot* slot_ = nullptr;  // null when all were taken
};

// Calls every registered function, and then shuts down the TCP connections of this process, as its
// end would. For the handler of a signal that is about to end this process.
void GiveDeathNotices();

}  // namespace ddp

#endif  // DDP_BASE_DEATH_NOTICE_H_
