// Maps each shared file once in a process, however often it is mapped.
//
// The ranks of a test are threads, and each maps the segment and the arenas for itself. To
// ThreadSanitizer those are different memory: it would see neither the accesses of two ranks to one
// byte nor the signals that order them. With this mmap() all ranks of the process share one
// mapping, also of an arena and its peers' view of it, and ThreadSanitizer checks the protocol.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <map>
#include <utility>

#include "base/mutex.h"

namespace {

struct Mapping {
  ino_t inode = 0;
  size_t bytes = 0;
  int users = 0;
};

struct Table {
  ddp::Mutex mutex;
  std::map<void*, Mapping> mappings ABSL_GUARDED_BY(mutex);
};

Table& TheTable() {
  static Table& table = *new Table();
  return table;
}

// ThreadSanitizer and the loader map files of their own before this library is set up.
bool set_up = false;

using Map = void*(void*, size_t, int, int, int, off_t);
using Unmap = int(void*, size_t);
Map* next_mmap = nullptr;
Unmap* next_munmap = nullptr;

[[gnu::constructor]] void SetUp() {
  next_mmap = reinterpret_cast<Map*>(::dlsym(RTLD_NEXT, "mmap"));
  next_munmap = reinterpret_cast<Unmap*>(::dlsym(RTLD_NEXT, "munmap"));
  set_up = next_mmap != nullptr && next_munmap != nullptr;
}

void* SystemMap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (set_up) return next_mmap(address, bytes, protection, flags, fd, offset);
  return reinterpret_cast<void*>(
      ::syscall(SYS_mmap, address, bytes, protection, flags, fd, offset));
}

}  // namespace

extern "C" void* mmap(void* address, size_t bytes, int protection, int flags, int fd,
                      off_t offset) noexcept {
  struct stat file {};
  const bool shared = set_up && (flags & MAP_SHARED) != 0 && offset == 0 && fd >= 0;
  if (!shared || ::fstat(fd, &file) != 0) {
    return SystemMap(address, bytes, protection, flags, fd, offset);
  }
  ddp::MutexLock lock(TheTable().mutex);
  for (auto& [base, mapping] : TheTable().mappings) {
    if (mapping.inode != file.st_ino || mapping.bytes != bytes) continue;
    ++mapping.users;
    // MapSharedAligned() asks for a place that it has reserved, and takes another one as well.
    if (address != nullptr) next_munmap(address, bytes);
    return base;
  }
  void* const base = SystemMap(address, bytes, protection, flags, fd, offset);
  if (base != MAP_FAILED) {
    TheTable().mappings[base] = {.inode = file.st_ino, .bytes = bytes, .users = 1};
  }
  return base;
}

extern "C" int munmap(void* address, size_t bytes) noexcept {
  if (!set_up) return static_cast<int>(::syscall(SYS_munmap, address, bytes));
  {
    ddp::MutexLock lock(TheTable().mutex);
    const auto found = TheTable().mappings.find(address);
    if (found != TheTable().mappings.end() && found->second.bytes == bytes) {
      if (--found->second.users > 0) return 0;
      TheTable().mappings.erase(found);
    }
  }
  return next_munmap(address, bytes);
}
