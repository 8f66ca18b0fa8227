#ifndef DDP_BASE_PROCESS_PROCESS_IDENTITY_H_
#define DDP_BASE_PROCESS_PROCESS_IDENTITY_H_

#include <string>

namespace ddp {

// Returns a text that identifies this process: "<the host's boot> <PID namespace> <process id>
// <start time>". Another process of the same host and PID namespace can prove by it that this one
// has ended. Empty when /proc does not tell. Thread: any.
std::string ProcessIdentity();

// Returns true when the process with this identity has certainly ended. Returns false for a process
// of another host or PID namespace, which this process cannot see, and for another text.
// Thread: any.
bool ProcessHasEnded(const std::string& identity);

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_PROCESS_IDENTITY_H_
