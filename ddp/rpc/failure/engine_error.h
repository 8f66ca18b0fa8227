// What LibTorch's backward engine tells of an error on another worker: a text.
#ifndef DDP_RPC_FAILURE_ENGINE_ERROR_H_
#define DDP_RPC_FAILURE_ENGINE_ERROR_H_

#include <optional>
#include <string>
#include <vector>

namespace ddp::rpc::internal {

// The start of LibTorch's text for an exception on another worker. The worker's id follows.
inline constexpr char kErrorOnNode[] = "Error on Node ";

// Returns "worker NAME is gone (REASON)", for a connection that broke. A worker between the caller
// and the lost one passes it on.
std::string LostWorkerText(const std::string& name, const std::string& reason);

struct EngineError {
  int worker = -1;            // on which the error was thrown
  std::string message;        // one line
  std::optional<int> lost{};  // the worker that `message` calls gone
};

// Returns the innermost error of "Error on Node 2: Error on Node 1: MESSAGE\n...", which is the
// cause; nullopt when `text` is of this worker. `names`: of all workers, by id.
std::optional<EngineError> ReadEngineError(const std::string& text,
                                           const std::vector<std::string>& names);

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_FAILURE_ENGINE_ERROR_H_
