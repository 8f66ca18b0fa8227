#ifndef DDP_COMM_REPORTS_PROCESS_IDENTITY_H_
#define DDP_COMM_REPORTS_PROCESS_IDENTITY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp::internal {

// Identifies a process. Another process of the same host and PID namespace can prove by it that the
// identified process has ended. The identity is the boot of the host, the PID namespace, the
// process id and the process's start time. A value; any thread.
struct ProcessIdentity {
  std::string boot;        // the kernel's boot_id
  uint64_t pid_space = 0;  // inode of the PID namespace
  int64_t pid = 0;
  uint64_t start_time = 0;  // clock ticks after the boot

  // Returns the identity of this process, or nullopt when /proc does not give it.
  static std::optional<ProcessIdentity> OfThisProcess();

  std::string Serialize() const;
  // Returns nullopt when `text` is not the result of Serialize().
  static std::optional<ProcessIdentity> Parse(absl::string_view text);

  // Returns true when the process has certainly ended. `observer` is the identity of the calling
  // process. Returns false for a process of another host or PID namespace, which the caller cannot
  // see.
  bool HasEnded(const ProcessIdentity& observer) const;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_PROCESS_IDENTITY_H_
