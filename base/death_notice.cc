#include "base/death_notice.h"

#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

namespace ddp {
namespace {

// Descriptors beyond this number are left to the kernel: the handler looks at each number.
constexpr long kMostDescriptors = 65'536;

int SocketOption(int descriptor, int option) {
  int value = 0;
  socklen_t size = sizeof(value);
  return ::getsockopt(descriptor, SOL_SOCKET, option, &value, &size) == 0 ? value : -1;
}

// A unix socket stays open: this process may share it with the launcher.
void ShutDownTcpConnections() {
  const long end = std::clamp(::sysconf(_SC_OPEN_MAX), 0L, kMostDescriptors);
  for (int descriptor = 0; descriptor < static_cast<int>(end); ++descriptor) {
    if (SocketOption(descriptor, SO_PROTOCOL) != IPPROTO_TCP) continue;
    if (SocketOption(descriptor, SO_ACCEPTCONN) == 0) ::shutdown(descriptor, SHUT_RDWR);
  }
}

}  // namespace

// A slot is free, taken, or filled. Only a filled one is called.
struct DeathNotice::Slot {
  std::atomic<bool> taken = false;
  std::atomic<void*> context = nullptr;
  std::atomic<void (*)(void*)> tell = nullptr;
};

DeathNotice::Slot DeathNotice::slots_[kMost];
std::atomic<int> DeathNotice::giving_ = 0;

DeathNotice::DeathNotice(void (*tell)(void* context), void* context) {
  for (Slot& slot : slots_) {
    if (slot.taken.load(std::memory_order_relaxed) || slot.taken.exchange(true)) continue;
    slot.context = context;
    slot.tell = tell;
    slot_ = &slot;
    return;
  }
}

// Either the handler sees the empty slot, or the destructor sees the handler.
DeathNotice::~DeathNotice() {
  if (slot_ == nullptr) return;
  slot_->tell = nullptr;
  while (giving_ != 0) ::sched_yield();
  slot_->taken = false;
}

void GiveDeathNotices() {
  ++DeathNotice::giving_;
  for (DeathNotice::Slot& slot : DeathNotice::slots_) {
    if (const auto tell = slot.tell.load()) tell(slot.context.load());
  }
  --DeathNotice::giving_;
  ShutDownTcpConnections();
}

}  // namespace ddp
