#ifndef DDP_LAUNCHER_OUTPUT_LINE_PREFIX_H_
#define DDP_LAUNCHER_OUTPUT_LINE_PREFIX_H_

#include <map>
#include <string>

namespace ddp::launcher {

// Replaces `${name}` and `$name` by `values[name]` in `text`, and `$$` by `$`. A name without a
// value and a `$` before anything else stay as they are. These are the rules of Python's
// Template.safe_substitute, for which users write log prefixes. Pure.
std::string ExpandTemplate(const std::string& text,
                           const std::map<std::string, std::string>& values);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_LINE_PREFIX_H_
