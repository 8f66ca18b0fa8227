// A worker's error file with any content: the record must be safe text for a terminal, and a file
// that is written from it must give the same record.
#include "elastic/error_file/error_record.h"

#include <glog/logging.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "testing/fuzz_target.h"

namespace ddp::elastic {
namespace {

// Returns true when `text` has no 7-bit or 8-bit control characters but newlines and tabs.
bool IsForTerminal(const std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f) return false;
    // U+0080 to U+009F in UTF-8.
    if (byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0) {
      return false;
    }
  }
  return true;
}

void CheckRecord(const ErrorRecord& record) {
  CHECK(!record.message.empty());
  CHECK(IsForTerminal(record.message)) << record.message;
  CHECK(IsForTerminal(record.callstack)) << record.callstack;
  CHECK(record.time == absl::InfinitePast() || record.time > absl::UnixEpoch()) << record.time;
  const std::string text = FormatErrorRecord(record);
  CHECK(testing::IsOneLine(text)) << text;
  const absl::StatusOr<ErrorRecord> again = ParseErrorRecord(text);
  CHECK(again.ok()) << text << ": " << again.status();
  CHECK_EQ(again->message, record.message);
  CHECK_EQ(again->callstack, record.callstack);
  CHECK_EQ(again->is_victim, record.is_victim) << text;
  // Files hold whole seconds; a time in 1970 counts as none.
  const int64_t seconds = absl::ToUnixSeconds(record.time);
  CHECK_EQ(absl::ToUnixSeconds(again->time),
           absl::ToUnixSeconds(seconds > 0 ? record.time : absl::InfinitePast()));
}

}  // namespace
}  // namespace ddp::elastic

namespace ddp::testing {

void FuzzOne(absl::string_view input) {
  const auto record = elastic::ParseErrorRecord(std::string(input));
  if (record.ok()) return elastic::CheckRecord(*record);
  CHECK(absl::IsInvalidArgument(record.status())) << record.status();
  CHECK(IsOneLine(record.status().message())) << record.status();
}

std::vector<std::string> FuzzSeeds() {
  return {
      R"({"message": {"message": "RuntimeError: no data", "extraInfo": {"py_callstack": )"
      R"("Traceback:\n  line 1\n", "timestamp": "1700000000", "victim": true}}})",
      R"({"message": "went wrong", "timestamp": 1700000000.5})",
      R"({"message": "m", "timestamp": 6, "extraInfo": {"py_callstack": ["a\n", "b"]}})",
      R"({"message": {"extraInfo": {"py_callstack": "Traceback:\nKeyError: 'k'\n"}}})",
      R"({"message": "gloo/pair.cc: Connection closed by peer", "extraInfo": {"victim": false}})",
      R"({"message": "\u001b[2J\u009b\u0000 \ud83d\ude00"})",
      R"({"message": {"message": "NCCL ncclRemoteError", "errorCode": -9}, "x": [[[1e3]]]})"};
}

}  // namespace ddp::testing
