#ifndef DDP_LAUNCHER_FLAGS_FLAG_READER_H_
#define DDP_LAUNCHER_FLAGS_FLAG_READER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// Values of all flags as text, by gflags name; switches are "true" or "false".
using FlagValues = std::map<std::string, std::string>;

// Reads the values of flags as numbers, times and names. An error is kInvalidArgument: one line
// that names the flag as the user wrote it, its value and the allowed values.
//
// Every method takes the flag's name in gflags. A name that `values` lacks is a programmer's
// mistake: Text() and every method that reads a value crash (CHECK). ParseLaunchOptions() makes one
// for its own use. Thread-compatible. Keeps references to its constructor's arguments, which must
// outlive it.
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

  // Returns true when the user set the flag, as a flag or a variable, to a non-empty value.
  bool IsGiven(const std::string& gflag) const;
  // Returns true when the user set the flag on the command line to a non-empty value.
  bool IsGivenAsFlag(const std::string& gflag) const;

  // Returns the value as a whole number within `range`: digits and an optional minus, nothing else.
  absl::StatusOr<int64_t> Integer(const std::string& gflag, Range range) const;
  // Returns the value as a whole number of milliseconds within `range`.
  absl::StatusOr<absl::Duration> Milliseconds(const std::string& gflag, Range range) const;
  // Returns the value as seconds, with or without a fraction, from 0 to a week.
  absl::StatusOr<absl::Duration> Seconds(const std::string& gflag) const;
  // Checks a value that is used in environment variables, key names, folder names and log prefixes:
  // 1 to `max_characters` characters of UTF-8, no control characters.
  absl::Status CheckName(const std::string& gflag, size_t max_characters = 128) const;

  // Returns the name that the user wrote ("--nproc_per_node", "-t", "PET_NNODES"), or the name in
  // the help.
  std::string NameOf(const std::string& gflag) const;
  absl::Status BadValue(const std::string& gflag, const std::string& expected) const;

 private:
  const FlagValues& values_;
  const std::map<std::string, std::string>& spelled_;
};

// Maximum of every time in a flag, in seconds: a week.
inline constexpr double kMaxFlagSeconds = 7 * 24 * 3600;

// Returns a flag's text as messages show it: control characters replaced by '?', and cut after 200
// bytes.
std::string Shown(std::string text);

// Parses digits with an optional minus. Returns false for anything else, such as blanks, a plus or
// an overflow.
bool ParseInteger(const std::string& text, int64_t* value);

// Parses a finite number of seconds from 0 to kMaxFlagSeconds. Returns false for anything else.
bool ParseSeconds(const std::string& text, absl::Duration* value);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_FLAG_READER_H_
