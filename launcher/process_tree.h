#ifndef DDP_LAUNCHER_PROCESS_TREE_H_
#define DDP_LAUNCHER_PROCESS_TREE_H_

#include <sys/types.h>

#include <set>
#include <vector>

#include "absl/time/time.h"

// The processes below this one, and their end. A child subreaper (PR_SET_CHILD_SUBREAPER) gets
// every descendant whose parent dies as a child of its own, whatever session or group it moved to;
// so who kills its children, and what becomes its child by that, until none is left, has killed
// them all.
namespace ddp::launcher {

// Children of `pid`, ended but not yet reaped ones included. Empty when there is no such process.
// A child that is started or adopted at the same moment may be missing: ask again.
std::vector<pid_t> ChildrenOf(pid_t pid);

// What one call of KillChildrenOnce() met.
struct KillPass {
  bool found_any = false;   // before it
  std::vector<pid_t> left;  // after it: SIGKILL was sent, and they have not ended yet
};

// One step of KillChildren(), without waiting: SIGKILLs and reaps what is there now. Nothing is
// left when two passes in a row have found none: one look may miss a child that is being adopted.
KillPass KillChildrenOnce(const std::set<pid_t>& spared);

// SIGKILLs every child of this process that is not in `spared`, with all descendants, and those
// that become children thereby; reaps them; returns when none is left or `timeout` has passed. The
// spared and what is below them are left alone.
//
// The calling process should be a child subreaper. Any thread, but nobody else may reap the
// children in question.
bool KillChildren(const std::set<pid_t>& spared, absl::Duration timeout);

// Reaps every child that has ended and is not in `spared`: adopted ones that nobody waits for.
void ReapChildren(const std::set<pid_t>& spared);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_TREE_H_
