#ifndef DDP_LAUNCHER_FLAGS_FLAG_READER_H_
#define DDP_LAUNCHER_FLAGS_FLAG_READER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// A flag that the user set.
struct GivenFlag {
  std::string value;    // of a switch: "true" or "false"
  std::string spelled;  // as the user wrote its name: "--nproc_per_node", "-t", "PET_NNODES"
};

// The flags that the user set, by their names in the table.
using GivenFlags = std::map<std::string, GivenFlag>;

// Reads the values of flags as numbers, times and names. An error is kInvalidArgument: one line
// that names the flag as the user wrote it, its value and the allowed values.
//
// Every method takes the flag's name in the table (launcher/flags/flag_table.h). Another name is a
// programmer's mistake: the methods crash (CHECK). Thread-compatible. Keeps a reference to its
// constructor's argument, which must outlive it.
class FlagReader {
 public:
  struct Range {
    int64_t min;
    int64_t max;
  };

  explicit FlagReader(const GivenFlags& given) : given_(given) {}

  // Returns the user's value, or the default; of a switch "true" or "false".
  std::string Text(const std::string& name) const;
  bool IsOn(const std::string& name) const { return Text(name) == "true"; }

  // Returns true when the user set the flag, as a flag or a variable, to a non-empty value.
  bool IsGiven(const std::string& name) const;
  // Returns true when the user set the flag on the command line to a non-empty value.
  bool IsGivenAsFlag(const std::string& name) const;

  // Returns the value as a whole number within `range`: digits and an optional minus, nothing else.
  absl::StatusOr<int64_t> Integer(const std::string& name, Range range) const;
  // Returns the value as a whole number of milliseconds within `range`.
  absl::StatusOr<absl::Duration> Milliseconds(const std::string& name, Range range) const;
  // Returns the value as seconds, with or without a fraction, from 0 to a week.
  absl::StatusOr<absl::Duration> Seconds(const std::string& name) const;
  // Checks a value that is used in environment variables, key names, folder names and log prefixes:
  // 1 to `max_characters` characters of UTF-8, no control characters.
  absl::Status CheckName(const std::string& name, size_t max_characters = 128) const;

  // Returns the name that the user wrote ("--nproc_per_node", "-t", "PET_NNODES"), or the name in
  // the help.
  std::string NameOf(const std::string& name) const;
  absl::Status BadValue(const std::string& name, const std::string& expected) const;

 private:
  const GivenFlags& given_;
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
