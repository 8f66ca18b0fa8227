// The bytes that a TCPStore client of LibTorch 2.11 and its server exchange. Pure: no socket.
//
// A connection begins with a validation; then the client sends requests, one after the other. A
// request is a byte that names it and its fields; a reply has no head, its form follows from the
// request, and some requests have none. Numbers are 8 bytes in the machine's order (of which we
// know little-endian only), a string is its length as such a number and its bytes.
//
//   request      fields                        reply
//   validate     4-byte magic                  none
//   ping         4-byte number                 the same 4 bytes
//   set          key, value                    none
//   append       key, value                    none
//   multi set    count, (key, value)...        none
//   compare set  key, expected, desired        the value that there is then, or `expected`
//   add          key, number                   the sum
//   get          key                           the value; empty where there is none
//   multi get    count, key...                 the values
//   delete       key                           how many keys that were: 0 or 1
//   key count    -                             a number
//   list keys    -                             a count and the keys
//   check        count, key...                 a byte: kReady or kNotReady
//   wait         count, key...                 the byte kStopWaiting, once all are there
//   cancel wait  -                             the byte kWaitCanceled, also where nothing waits
//   queue push   key, value                    none
//   queue pop    key                           its length and, unless that is 0, the oldest value
//   queue len    key                           a number
//
// get, multi get and queue pop do not wait: the client sends a wait before, and cancels it when its
// time is up.
#ifndef DDP_STORE_TCP_STORE_PROTOCOL_H_
#define DDP_STORE_TCP_STORE_PROTOCOL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::store {

enum class TcpStoreQuery : uint8_t {
  kValidate,
  kSet,
  kCompareSet,
  kGet,
  kAdd,
  kCheck,
  kWait,
  kKeyCount,
  kDelete,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancelWait,
  kPing,
  kQueuePush,
  kQueuePop,
  kQueueLength,
  kListKeys,
};

inline constexpr uint32_t kTcpStoreMagic = 0x3C85F7CE;

// One-byte replies.
inline constexpr char kReady = 0;
inline constexpr char kNotReady = 1;
inline constexpr char kStopWaiting = 0;
inline constexpr char kWaitCanceled = 1;

struct TcpStoreRequest {
  TcpStoreQuery query = TcpStoreQuery::kPing;
  std::vector<std::string> keys;
  std::vector<std::string> values;  // of compare set: expected, desired
  int64_t number = 0;               // what to add; the magic; the ping's number
};

// What clients may make the server hold. LibTorch's own refuses keys above 8 KiB and values above
// 8 MiB.
struct TcpStoreLimits {
  size_t max_key_bytes = size_t{64} << 10;
  size_t max_value_bytes = size_t{64} << 20;
  size_t max_keys_per_request = size_t{128} << 10;
  size_t max_reply_bytes = size_t{256} << 20;
  // Of all clients together: what they have stored and wait for; and the requests that they have
  // not finished and the replies that they have not read.
  size_t max_stored_bytes = size_t{1} << 30;
  size_t max_buffered_bytes = size_t{1} << 30;
  int max_clients = 16384;
};

// What an entry of a map or a list costs besides its text, for the sums that are held against the
// limits.
inline constexpr size_t kTcpStoreEntryBytes = 128;

// Cuts what one client sends into requests. The pieces may be of any size; nothing is read twice,
// and nothing is reserved because a client says that so much will come.
//
// Thread-compatible.
class TcpStoreParser {
 public:
  // `limits` is not owned and must outlive the parser.
  explicit TcpStoreParser(const TcpStoreLimits* limits);

  void Append(const char* data, size_t size);

  // The next request; nullopt: more bytes are needed. kInvalidArgument: that is no request, or one
  // beyond the limits; the parser is of no more use then.
  absl::StatusOr<std::optional<TcpStoreRequest>> Next();

  // What it holds: bytes not looked at, and the fields of an unfinished request.
  size_t held_bytes() const { return input_.size() + field_.capacity() + request_bytes_; }

 private:
  // Both return false when more bytes are needed.
  bool TakeNumber(size_t size, uint64_t& number);
  absl::StatusOr<bool> TakeString(size_t limit, const char* what);

  absl::StatusOr<bool> TakeField(char field);
  absl::Status BeginRequest(uint8_t query);
  TcpStoreRequest EndRequest();

  const TcpStoreLimits* const limits_;
  std::string input_;
  size_t offset_ = 0;  // of what has not been looked at, in `input_`

  const char* fields_ = nullptr;  // of the request at hand, those still to come; nullptr: none
  const char* repeated_ = nullptr;
  uint64_t repeats_ = 0;  // how often `repeated_` comes still
  TcpStoreRequest request_;
  size_t request_bytes_ = 0;
  bool in_string_ = false;
  uint64_t missing_bytes_ = 0;  // of the string at hand
  std::string field_;
};

// Append to `out` in the form of the wire.
void AppendNumber(std::string& out, int64_t number);
void AppendString(std::string& out, const std::string& text);
void AppendQuery(std::string& out, TcpStoreQuery query);

// What a client sends first, and its server answers with the last four bytes of.
std::string TcpStoreGreeting(uint32_t number);

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_PROTOCOL_H_
