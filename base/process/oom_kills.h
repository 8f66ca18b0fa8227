#ifndef DDP_BASE_PROCESS_OOM_KILLS_H_
#define DDP_BASE_PROCESS_OOM_KILLS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace ddp {

// The processes that the kernel's OOM killer ended in this process's control group: the kernel
// counts them, and tells a parent SIGKILL only. Without a memory controller, those of the host.
//
// Thread-compatible.
class OomKills {
 public:
  // Ignores earlier kills. Reads files below `root` as FindControlGroup() does.
  explicit OomKills(std::string root = "") : root_(std::move(root)) { Forget(); }

  // Ignores the kills up to now.
  void Forget() { taken_ = Count(); }

  // Explains the end of one process by SIGKILL that this process did not send: "out of memory:
  // ...", with the limit and the peak. Empty when the OOM killer ended no process that is not yet
  // explained.
  std::string Explain();

 private:
  std::optional<int64_t> Count() const;

  const std::string root_;
  std::optional<int64_t> taken_;  // nullopt: there is no counter
};

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_OOM_KILLS_H_
