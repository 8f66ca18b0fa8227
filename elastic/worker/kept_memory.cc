#include "elastic/worker/kept_memory.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::elastic::internal {

std::string ReasonToLeaveMalloc(const VariableGetter& variable) {
  if (variable("DDP_KEEP_FREED_MEMORY") == "0") return "DDP_KEEP_FREED_MEMORY=0";
  for (const char* const name :
       {"MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}) {
    if (variable(name).has_value()) return absl::StrCat(name, " is set");
  }
  const std::string tunables = variable("GLIBC_TUNABLES").value_or("");
  for (const char* const name :
       {"glibc.malloc.mmap_threshold", "glibc.malloc.mmap_max", "glibc.malloc.trim_threshold"}) {
    if (absl::StrContains(tunables, name)) return absl::StrCat("GLIBC_TUNABLES sets ", name);
  }
  return "";
}

bool KeepFreedMemory(const VariableGetter& variable) {
  if (!ReasonToLeaveMalloc(variable).empty()) return false;
#if defined(__GLIBC__)
  // glibc accepts no mmap threshold above 32 MiB, so a larger one would not cover every gradient.
  // The value -1 turns trimming off.
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, -1) == 1;
#else
  return false;
#endif
}

}  // namespace ddp::elastic::internal
