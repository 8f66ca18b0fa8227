#ifndef DDP_COMMON_KEEP_FOREVER_H_
#define DDP_COMMON_KEEP_FOREVER_H_

#include <atomic>
#include <utility>

namespace ddp::internal {

// Keeps `value` until the process ends, without destroying it: for what another process or thread
// may still use at any time. Reachable, so that a leak check does not report it. Takes no lock, so
// that a forked child may call it. Thread: any.
template <typename T>
void KeepForever(T value) {
  struct Node {
    T value;
    Node* next;
  };
  static std::atomic<Node*> last = nullptr;
  auto* const node = new Node{std::move(value), last.load()};
  while (!last.compare_exchange_weak(node->next, node)) {
  }
}

}  // namespace ddp::internal

#endif  // DDP_COMMON_KEEP_FOREVER_H_
