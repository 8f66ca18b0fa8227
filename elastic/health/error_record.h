#ifndef DDP_ELASTIC_HEALTH_ERROR_RECORD_H_
#define DDP_ELASTIC_HEALTH_ERROR_RECORD_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ddp::elastic {

// The environment variable that names a worker's error file; empty or unset: none is wanted.
inline constexpr char kErrorFileVariable[] = "TORCHELASTIC_ERROR_FILE";

// What a worker says about its failure, in the file that the launcher named to it.
struct ErrorRecord {
  std::string message;                     // "RuntimeError: the data has ended"; never empty
  std::string callstack = {};              // several lines, or empty
  absl::Time time = absl::InfinitePast();  // when the worker failed; InfinitePast: it did not say
  bool is_victim = false;                  // by its own account a peer failed first
};

// The largest error file that is looked at.
inline constexpr size_t kMaxErrorRecordBytes = 1 << 20;

// Reads `path`. The writer may be any program, or one that died while writing: whatever is in the
// file, the answer is an ErrorRecord or an error, and text comes out with control characters
// replaced, so that it cannot play tricks on a terminal.
//
// Any thread. Errors: kNotFound (there is no such file, or it is empty: the worker wrote nothing),
// kInvalidArgument (too large, no regular file, no JSON, not of the format; says which).
absl::StatusOr<ErrorRecord> ReadErrorRecord(const std::string& path);

// The same for the contents. Accepts both forms that torchrun's workers write:
//   {"message": {"message": M, "extraInfo": {"py_callstack": C, "timestamp": T, "victim": V}}}
//   {"message": M, "timestamp": T}
// and "extraInfo" in the second one, too. C is a text or a list of lines; where M is empty, the
// last line of C stands for it. T is a number of seconds, as a number or as text. V is ours, a
// boolean, and other readers pass over it; where it is missing, M decides (SoundsLikeVictim). Pure.
absl::StatusOr<ErrorRecord> ParseErrorRecord(const std::string& text);

// The first form, on one line. Bytes that are no UTF-8 are replaced. "victim" is there when it is
// true, and when it is false and `message` sounds otherwise. Pure.
std::string FormatErrorRecord(const ErrorRecord& record);

// Whether `message` is one of the texts by which Gloo, NCCL or a TCPStore tell that the other side
// of a connection has gone. Programs that know nothing of us end with these when a peer dies. A
// lost connection to anything else is no such text.
bool SoundsLikeVictim(absl::string_view message);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_ERROR_RECORD_H_
