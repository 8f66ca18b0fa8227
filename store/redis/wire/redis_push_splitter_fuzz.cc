// The bytes of a Redis connection with pushes. The two streams do not depend on the pieces in which
// the bytes came. They hold no more than a small multiple of the bytes, and are RESP2 to a second
// splitter.
#include "store/redis/wire/redis_push_splitter.h"

#include <glog/logging.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "testing/fuzz_target.h"

namespace ddp::store {
namespace {

struct Outcome {
  std::string replies;
  std::string pushes;
  absl::Status status;
};

Outcome Split(const std::vector<std::vector<char>>& pieces) {
  RedisPushSplitter splitter;
  Outcome outcome;
  for (const std::vector<char>& piece : pieces) {
    outcome.status = splitter.Split(piece.data(), piece.size(), outcome.replies, outcome.pushes);
    if (!outcome.status.ok()) break;
  }
  CHECK(outcome.status.ok() || absl::IsInternal(outcome.status)) << outcome.status;
  return outcome;
}

Outcome Split(absl::string_view stream) { return Split({{stream.begin(), stream.end()}}); }

}  // namespace
}  // namespace ddp::store

namespace ddp::testing {

// Input: a byte that says where the pieces end, then the connection's bytes.
void FuzzOne(absl::string_view bytes) {
  FuzzInput input(bytes);
  const uint8_t cuts = input.TakeByte();
  const absl::string_view stream = input.rest();
  const store::Outcome whole = store::Split(stream);
  const store::Outcome cut = store::Split(FuzzPieces(stream, cuts));
  CHECK_EQ(whole.status.ok(), cut.status.ok()) << whole.status << " in one piece, " << cut.status;
  CHECK_EQ(whole.replies, cut.replies);
  CHECK_EQ(whole.pushes, cut.pushes);
  // "_\r\n" becomes "$-1\r\n".
  CHECK_LE(whole.replies.size() + whole.pushes.size(), 2 * stream.size());
  for (const std::string& text : {whole.replies, whole.pushes}) {
    const store::Outcome again = store::Split(text);
    CHECK(again.status.ok()) << again.status;
    CHECK_EQ(again.replies, text);
    CHECK(again.pushes.empty()) << again.pushes;
  }
}

std::vector<std::string> FuzzSeeds() {
  const std::string push = ">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$0\r\n\r\n";
  return {
      absl::StrCat("a", "+OK\r\n-ERR\r\n:12\r\n$5\r\nhello\r\n$-1\r\n*-1\r\n"),
      absl::StrCat("b", push, "*3\r\n:1\r\n", push, ":1\r\n", push, "$1\r\nx\r\n"),
      absl::StrCat("c", "_\r\n%2\r\n+a\r\n:1\r\n+b\r\n*0\r\n%0\r\n"),
      absl::StrCat("d", ">2\r\n$10\r\ninvalidate\r\n*2\r\n$1\r\na\r\n%1\r\n_\r\n:5\r\n+OK\r\n")};
}

}  // namespace ddp::testing
