#include "launcher/meeting/name_wait.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "launcher/output/say.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(100);
constexpr absl::Duration kLongestPause = absl::Seconds(2);

}  // namespace

absl::Status AwaitName(const NameWaitOptions& options,
                       const std::function<absl::Status()>& look_up) {
  const auto now = options.now ? options.now : [] { return MonotonicClock().Now(); };
  const absl::Time start = now();
  bool told_user = false;
  for (absl::Duration pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    const absl::Status looked_up = look_up();
    if (looked_up.ok()) return looked_up;
    const std::string why = absl::StrCat(options.what, ": ", std::string(looked_up.message()));
    if (!absl::IsUnavailable(looked_up)) return absl::Status(looked_up.code(), why);
    const absl::Duration waited = now() - start;
    if (waited >= options.timeout) {
      return absl::DeadlineExceededError(
          absl::StrCat(why, " (waited for the name for ", absl::FormatDuration(options.timeout),
                       "; --rdzv-conf join_timeout=SECONDS sets how long)"));
    }
    if (!told_user && waited >= options.quiet) {
      told_user = true;
      const std::string line = absl::StrCat("waiting for the name, at most ",
                                            absl::FormatDuration(options.timeout), ": ", why);
      options.say ? options.say(line) : Say(line);
    }
    // Shortens the pause so that neither the message to the user nor the end is late.
    const absl::Duration left = (told_user ? options.timeout : options.quiet) - waited;
    pause = std::min({pause, left, options.timeout - waited});
    options.rest ? options.rest(pause) : Pause(pause);
  }
}

}  // namespace ddp::launcher
