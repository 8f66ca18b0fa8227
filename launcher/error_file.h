#ifndef DDP_LAUNCHER_ERROR_FILE_H_
#define DDP_LAUNCHER_ERROR_FILE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// What a worker wrote about its failure into the file that TORCHELASTIC_ERROR_FILE names.
struct ErrorFile {
  std::string message;                     // "RuntimeError: the data has ended"; never empty
  std::string callstack;                   // several lines, or empty
  absl::Time time = absl::InfinitePast();  // when the worker failed; InfinitePast: it did not say
};

// The largest error file that is looked at.
inline constexpr size_t kMaxErrorFileBytes = 1 << 20;

// Reads `path`. The writer may be any program, or one that died while writing: whatever is in the
// file, the answer is an ErrorFile or an error, and text comes out with control characters
// replaced, so that it cannot play tricks on a terminal.
//
// Any thread. Errors: kNotFound (there is no such file, or it is empty: the worker wrote nothing),
// kInvalidArgument (too large, no regular file, no JSON, not of the format; says which).
absl::StatusOr<ErrorFile> ReadErrorFile(const std::string& path);

// The same for the contents. Accepts both forms that torchrun's workers write:
//   {"message": {"message": M, "extraInfo": {"py_callstack": C, "timestamp": T}}}
//   {"message": M, "timestamp": T}
// where T is a number of seconds, as a number or as text. Pure.
absl::StatusOr<ErrorFile> ParseErrorFile(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_ERROR_FILE_H_
