#ifndef DDP_BASE_PROCESS_CONTROL_GROUP_H_
#define DDP_BASE_PROCESS_CONTROL_GROUP_H_

#include <string>
#include <vector>

namespace ddp {

// A control group (cgroup) of Linux.
struct ControlGroup {
  int version = 2;  // of the cgroup file system: 1 or 2
  // The group's folder, then the folders of its outer groups that this process can see. Empty when
  // there is no such group.
  std::vector<std::string> folders;
};

// Returns the control group in which `controller` ("cpu", "memory") handles this process. Reads
// proc/self/cgroup and proc/self/mountinfo below `root`. Thread: any.
ControlGroup FindControlGroup(const std::string& controller, const std::string& root = "");

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_CONTROL_GROUP_H_
