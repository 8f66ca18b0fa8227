#ifndef DDP_LAUNCHER_FLAGS_FLAG_DEFAULT_H_
#define DDP_LAUNCHER_FLAGS_FLAG_DEFAULT_H_

#include <span>
#include <string>
#include <variant>

#include "absl/time/time.h"

namespace ddp::launcher {

// A time whose flag takes seconds or milliseconds.
struct InSeconds {
  absl::Duration value;
};
struct InMilliseconds {
  absl::Duration value;
};

// The default of --nnodes.
struct NodeRange {
  int min = 1;
  int max = 1;
};

// The default of --signals-to-handle: numbers of signals.
struct SignalList {
  std::span<const int> signals;
};

// The default of a flag, as the value that the job uses. Each default is written once, in the type
// that has the setting, and the flag table takes it from there. A text is what the user would
// write; "" means no default. Texts and lists live as long as the program.
using FlagDefault =
    std::variant<const char*, int, double, InSeconds, InMilliseconds, NodeRange, SignalList>;

// Returns the default as the user would write it: "200", "1.5", "1:1", "SIGTERM,SIGINT". Pure.
// Thread: any.
std::string TextOf(const FlagDefault& value);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_FLAG_DEFAULT_H_
