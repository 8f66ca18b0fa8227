#ifndef DDP_LAUNCHER_PROCESS_PROCESS_TREE_H_
#define DDP_LAUNCHER_PROCESS_PROCESS_TREE_H_

#include <sys/types.h>

#include <set>
#include <vector>

#include "absl/time/time.h"

// Finding and killing the processes below this one.
//
// A child subreaper (PR_SET_CHILD_SUBREAPER) becomes the parent of every descendant whose parent
// dies, in any session or group. A subreaper therefore kills all descendants if it kills its
// children again and again until none is left.
namespace ddp::launcher {

// Returns true when /proc shows this process under its own number. In a PID namespace with the
// /proc of another one, numbers read there mean other processes, and nothing may be done to them.
bool ProcShowsThisNamespace();

// Returns the children of `pid`, also those that have ended and are not yet reaped. Empty when
// there is no such process, and without ProcShowsThisNamespace(). A child that is started or
// adopted at the same moment may be missing: ask again.
std::vector<pid_t> ChildrenOf(pid_t pid);

// Result of one call of KillChildrenOnce().
struct KillPass {
  bool found_any = false;   // true when there were children before it
  std::vector<pid_t> left;  // children that have not ended yet after SIGKILL
};

// Makes a pass of KillChildren() without blocking: sends SIGKILL to the present children and reaps
// those that have ended. Only two passes in a row that find none mean that none is left: a single
// pass may miss a child that is being adopted.
KillPass KillChildrenOnce(const std::set<pid_t>& spared);

// Sends SIGKILL to every child of this process that is not in `spared`, with all descendants, and
// to those that become children thereby; reaps them. The processes in `spared` and below them are
// left alone. Blocks until none is left or `timeout` has passed. Returns true when none was left.
//
// The calling process should be a child subreaper. Thread: any, but no other thread may reap these
// children.
bool KillChildren(const std::set<pid_t>& spared, absl::Duration timeout);

// Reaps every child that has ended and is not in `spared`. For adopted children: no other code
// waits for them.
void ReapChildren(const std::set<pid_t>& spared);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_PROCESS_TREE_H_
