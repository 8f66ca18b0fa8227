// An error that LibTorch's backward engine passes from worker to worker. LibTorch's messages carry
// a text alone, so the workers write what they must know of the cause into its first fields.
#ifndef DDP_RPC_FAILURE_ENGINE_ERROR_H_
#define DDP_RPC_FAILURE_ENGINE_ERROR_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp::rpc::internal {

// The first word of the text of an exception on another worker. The worker's id follows.
inline constexpr char kErrorOnNode[] = "Error on Node ";

// The cause of an error. A value.
struct EngineError {
  int worker = -1;            // on which it was thrown; -1: this one
  std::string message;        // for a person
  std::optional<int> lost{};  // the worker that is gone
  bool timeout = false;       // an answer did not come in time

  // Returns the text of an error of this worker: its fields and the message.
  std::string Serialize() const;

  // Reads "Error on Node 2: Error on Node 1: TEXT", where TEXT is the result of Serialize() or the
  // text of any exception. The fields are read at their places only, whatever a message says.
  static EngineError Parse(absl::string_view text);
};

// Returns "worker NAME is gone (REASON)", for a connection that broke.
std::string LostWorkerText(const std::string& name, const std::string& reason);

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_FAILURE_ENGINE_ERROR_H_
