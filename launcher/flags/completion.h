#ifndef DDP_LAUNCHER_FLAGS_COMPLETION_H_
#define DDP_LAUNCHER_FLAGS_COMPLETION_H_

#include <string>

namespace ddp::launcher {

// Returns a script with which `shell` ("bash" or "zsh") completes ddprun's flags, their values
// where these are words or files, and the program. It completes the program's own arguments as
// files. The script is made from the flag table. The user sources it:
//
//   source <(ddprun --print-completion bash)
std::string CompletionScript(const std::string& shell);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_COMPLETION_H_
