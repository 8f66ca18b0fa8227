#ifndef DDP_ELASTIC_ERROR_FILE_ERROR_RECORD_H_
#define DDP_ELASTIC_ERROR_FILE_ERROR_RECORD_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ddp::elastic {

// Environment variable that names a worker's error file; empty or unset: no file is wanted.
inline constexpr char kErrorFileVariable[] = "TORCHELASTIC_ERROR_FILE";

// A worker's own account of its failure, in the error file that the launcher named.
struct ErrorRecord {
  std::string message;                     // "RuntimeError: the data has ended"; never empty
  std::string callstack = {};              // several lines, or empty
  absl::Time time = absl::InfinitePast();  // time of the failure; InfinitePast: not given
  bool is_victim = false;                  // a peer failed first, says the worker
};

// Maximal size of an error file; a larger one is refused.
inline constexpr size_t kMaxErrorRecordBytes = 1 << 20;

// Reads `path`. The writer may be any program, and may have died while writing. Any content gives
// an ErrorRecord or an error. Control characters in texts, except tab and newline, are replaced, so
// that they cannot control a terminal.
//
// Any thread. Errors: kNotFound (no such file, or it is empty: the worker wrote nothing),
// kInvalidArgument (unreadable, too large, not a regular file, not JSON, wrong format; says which).
absl::StatusOr<ErrorRecord> ReadErrorRecord(const std::string& path);

// Parses the contents of an error file. Accepts both forms that torchrun's workers write:
//   {"message": {"message": M, "extraInfo": {"py_callstack": C, "timestamp": T, "victim": V}}}
//   {"message": M, "timestamp": T}
// The second form may have "extraInfo" too. C is a text or a list of lines; its last line replaces
// an empty M. T is a number of seconds, as a number or as text. V is our own boolean, which other
// readers ignore; without it SoundsLikeVictim(M) decides. Pure. Errors: kInvalidArgument.
absl::StatusOr<ErrorRecord> ParseErrorRecord(const std::string& text);

// Formats the first form, on one line. Bytes that are not UTF-8 are replaced. "victim" is written
// when it is true, or when it is false and SoundsLikeVictim(message) is true. Pure.
std::string FormatErrorRecord(const ErrorRecord& record);

// Returns true when `message` is a text by which Gloo, NCCL or a TCPStore report a lost peer.
// Programs that do not use //ddp end with these texts when a peer dies. A lost connection to
// anything else does not match.
bool SoundsLikeVictim(absl::string_view message);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_ERROR_FILE_ERROR_RECORD_H_
