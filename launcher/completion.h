#ifndef DDP_LAUNCHER_COMPLETION_H_
#define DDP_LAUNCHER_COMPLETION_H_

#include <string>

namespace ddp::launcher {

// A script that teaches `shell` ("bash" or "zsh") to complete ddprun's flags, their values where
// these are words or files, and the program; in the program's own arguments, files. Made from the
// flag table. To be sourced:
//
//   source <(ddprun --print-completion bash)
std::string CompletionScript(const std::string& shell);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_COMPLETION_H_
