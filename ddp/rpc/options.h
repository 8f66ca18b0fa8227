#ifndef DDP_RPC_OPTIONS_H_
#define DDP_RPC_OPTIONS_H_

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "ddp/rpc/registry.h"

namespace ddp::rpc {

// Options of init().
struct Options {
  // The number of this worker, and how many workers there are. 0 <= rank < world_size < 32768.
  int rank = 0;
  int world_size = 1;

  // The functions and classes that other workers may call here.
  Registry registry = {};

  // The time limit of a call without a limit of its own, and of each message of a backward. Also
  // of connecting, and of the end of shutdown().
  std::chrono::milliseconds timeout = std::chrono::seconds(60);

  // How many calls of other workers run at once. A call that waits for another worker occupies one.
  int threads = 16;

  // For tests of programs: messages that are lost or late. The names are LibTorch's MessageType:
  // SCRIPT_CALL is a call outside of a context, CLEANUP_AUTOGRAD_CONTEXT_REQ the end of a context.
  // LibTorch knows no faults of calls within a context and of messages of a backward.
  struct Faults {
    std::vector<std::string> lost =
        {};          // these messages are not sent; their calls fail at once ...
    int losses = 0;  // ... this many times for each message
    std::map<std::string, double> delay_seconds = {};  // by message
    bool any() const { return losses > 0 || !delay_seconds.empty(); }
  };
  Faults faults = {};
};

}  // namespace ddp::rpc

#endif  // DDP_RPC_OPTIONS_H_
