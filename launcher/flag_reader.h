#ifndef DDP_LAUNCHER_FLAG_READER_H_
#define DDP_LAUNCHER_FLAG_READER_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// The values of all flags as text, by their name in gflags; switches are "true" or "false".
using FlagValues = std::map<std::string, std::string>;

// Reads the values of flags as numbers, times and names. Each mistake is one line that names the
// flag as the user wrote it, its value and what is allowed (kInvalidArgument).
//
// A flag is named by its name in gflags; to name one that is not there is a programmer's mistake.
// Thread-compatible; keeps references to what it is made of.
class FlagReader {
 public:
  struct Range {
    int64_t min;
    int64_t max;
  };

  // `spelled` is CommandLine::spelled.
  FlagReader(const FlagValues& values, const std::map<std::string, std::string>& spelled)
      : values_(values), spelled_(spelled) {}

  const std::string& Text(const std::string& gflag) const;
  bool IsOn(const std::string& gflag) const { return Text(gflag) == "true"; }

  // The user set it, and to something.
  bool IsGiven(const std::string& gflag) const;
  // On the command line, that is: not by a variable.
  bool IsGivenAsFlag(const std::string& gflag) const;

  // A whole number: digits and perhaps a minus, nothing else.
  absl::StatusOr<int64_t> Integer(const std::string& gflag, Range range) const;
  // The same, as milliseconds.
  absl::StatusOr<absl::Duration> Milliseconds(const std::string& gflag, Range range) const;
  // Seconds with or without a fraction, from 0 to a week.
  absl::StatusOr<absl::Duration> Seconds(const std::string& gflag) const;
  // What is to stand in environment variables, names of keys and folders, and log prefixes.
  absl::Status CheckName(const std::string& gflag) const;

  // "--nproc_per_node", "-t", "PET_NNODES": what the user wrote, or the name in the help.
  std::string NameOf(const std::string& gflag) const;
  absl::Status BadValue(const std::string& gflag, const std::string& expected) const;

 private:
  const FlagValues& values_;
  const std::map<std::string, std::string>& spelled_;
};

// The longest that a flag or a part of one can name, in seconds: a week.
inline constexpr double kMaxFlagSeconds = 7 * 24 * 3600;

// The text of a flag as a message shows it: on one line, whatever is in it, and cut where it is
// long.
std::string Shown(std::string text);

// Digits with an optional minus; no blanks, no plus, nothing that does not fit.
bool ParseInteger(const std::string& text, int64_t* value);

// A finite number of seconds from 0 to kMaxFlagSeconds.
bool ParseSeconds(const std::string& text, absl::Duration* value);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAG_READER_H_
