// LibTorch's CPU allocator, with blocks of the process's Arena for gradients.
//
// A gradient that autograd makes during a backward then lies in shared memory already. The
// allocator serves a block while it is armed, for a size that an ArenaDemand has registered, as
// long as the arena has room. Every other request goes to the allocator that was installed before.
//
// The first model that wants in-place reduction installs the allocator. The allocator is never
// uninstalled, because tensors keep a pointer to it. A program without such a model keeps
// LibTorch's own allocator and sees nothing of this file.
//
// Arming. The allocator is armed during backwards only. Otherwise activations of a gradient's size
// would use the arena up in the forward. Unarmed, an allocation costs one relaxed load more, and a
// deallocation one comparison of addresses.
#ifndef DDP_REDUCER_ARENA_ARENA_ALLOCATOR_H_
#define DDP_REDUCER_ARENA_ARENA_ALLOCATOR_H_

#include "base/language.h"

namespace ddp::internal {

// Installs the allocator, on the first call. Returns true when LibTorch allocates through it. The
// result is false when
//   - the arena of the process could not be made: see Arena::status(). Nothing is installed;
//   - the program has installed another allocator since. That allocator stays.
// The allocator takes the priority of the allocator before it, so the program can still install one
// of its own. Thread: one at a time, and none may call c10::SetCPUAllocator() meanwhile. Other
// threads may allocate.
bool InstallArenaAllocator();

// Arms and disarms the allocator. The process counts: the allocator is armed while more calls of
// Arm than of Disarm have been made. Thread: any. Free of allocation and locks.
void ArmArenaAllocator();
void DisarmArenaAllocator();

// Arms the allocator for a scope.
class ArmedArenaAllocator {
 public:
  ArmedArenaAllocator() { ArmArenaAllocator(); }
  ~ArmedArenaAllocator() { DisarmArenaAllocator(); }
  ArmedArenaAllocator(const ArmedArenaAllocator&) = delete;
  ArmedArenaAllocator& operator=(const ArmedArenaAllocator&) = delete;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_ARENA_ARENA_ALLOCATOR_H_
