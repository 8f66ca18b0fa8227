#ifndef DDP_LAUNCHER_LINE_PREFIX_H_
#define DDP_LAUNCHER_LINE_PREFIX_H_

#include <map>
#include <string>

namespace ddp::launcher {

// Replaces `${name}` and `$name` by `values[name]` in `text`, and `$$` by `$`. What has no value,
// and a `$` before anything else, stays as it is. The rules of Python's Template.safe_substitute,
// which log prefixes are written for. Pure.
std::string ExpandTemplate(const std::string& text,
                           const std::map<std::string, std::string>& values);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LINE_PREFIX_H_
