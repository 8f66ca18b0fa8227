#include "testing/accelerator/runtime/double_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ddp::testing {
namespace {

void Check(bool ok, const char* call) {
  if (!ok) throw std::system_error(errno, std::generic_category(), call);
}

}  // namespace

DoubleMapping::DoubleMapping(size_t bytes, Kind kind)
    : size_(bytes), file_(memfd_create("simulated device", MFD_CLOEXEC)) {
  Check(file_.valid(), "memfd_create");
  Check(ftruncate(file_.get(), static_cast<off_t>(size_)) == 0, "ftruncate");
  constexpr int kReadWrite = PROT_READ | PROT_WRITE;
  base_ = Map(kind == Kind::kPinned ? kReadWrite : PROT_NONE);
  view_ = Map(kReadWrite);
}

DoubleMapping::~DoubleMapping() {
  munmap(base_, size_);
  munmap(view_, size_);
}

void DoubleMapping::Discard(size_t offset, size_t bytes) {
  Check(fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0,
        "fallocate");
}

char* DoubleMapping::Map(int protection) {
  void* mapped = mmap(nullptr, size_, protection, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  Check(mapped != MAP_FAILED, "mmap");
  madvise(mapped, size_, MADV_DONTDUMP);
  return static_cast<char*>(mapped);
}

}  // namespace ddp::testing
