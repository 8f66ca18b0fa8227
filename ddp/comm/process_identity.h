#ifndef DDP_COMM_PROCESS_IDENTITY_H_
#define DDP_COMM_PROCESS_IDENTITY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp::internal {

// Names a process so that another process of the same host can prove that it has ended: by the
// boot of the host, the PID namespace, the process id and the time at which the process started.
struct ProcessIdentity {
  std::string boot;        // of the kernel
  uint64_t pid_space = 0;  // inode of the PID namespace
  int64_t pid = 0;
  uint64_t start_time = 0;  // clock ticks after the boot

  // This process. Nullopt: /proc does not tell.
  static std::optional<ProcessIdentity> OfThisProcess();

  std::string Serialize() const;
  // Nullopt: not such a text.
  static std::optional<ProcessIdentity> Parse(absl::string_view text);

  // Whether the process has certainly ended. False as well for a process of another host or PID
  // namespace than `observer`, of which `observer` can know nothing.
  bool HasEnded(const ProcessIdentity& observer) const;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_PROCESS_IDENTITY_H_
