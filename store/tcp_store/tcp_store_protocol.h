// The wire protocol between a TCPStore client of LibTorch 2.11 and its server. Pure: no socket.
//
// A connection begins with a validation. Then the client sends requests, one after another. A
// request is a byte that names its kind, and its fields. A reply has no header: its form follows
// from the request, and some requests have no reply. A number is 8 bytes in the machine's byte
// order (only little-endian is supported). A string is its length as such a number, and its bytes.
//
//   request      fields                        reply
//   validate     4-byte magic                  none
//   ping         4-byte number                 the same 4 bytes
//   set          key, value                    none
//   append       key, value                    none
//   multi set    count, (key, value)...        none
//   compare set  key, expected, desired        the key's value afterwards; none: `expected`
//   add          key, number                   the sum
//   get          key                           the value; empty where there is none
//   multi get    count, key...                 the values
//   delete       key                           the number of deleted keys: 0 or 1
//   key count    -                             a number
//   list keys    -                             a count and the keys
//   check        count, key...                 a byte: kReady or kNotReady
//   wait         count, key...                 the byte kStopWaiting, once all keys are present
//   cancel wait  -                             the byte kWaitCanceled, also without a wait
//   queue push   key, value                    none
//   queue pop    key                           the queue's length; unless it is 0, the oldest value
//   queue len    key                           a number
//
// get, multi get and queue pop do not block: the client sends a wait before them, and cancels the
// wait when its own timeout is over.
#ifndef DDP_STORE_TCP_STORE_TCP_STORE_PROTOCOL_H_
#define DDP_STORE_TCP_STORE_TCP_STORE_PROTOCOL_H_

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

// The replies of one byte.
inline constexpr char kReady = 0;
inline constexpr char kNotReady = 1;
inline constexpr char kStopWaiting = 0;
inline constexpr char kWaitCanceled = 1;

struct TcpStoreRequest {
  TcpStoreQuery query = TcpStoreQuery::kPing;
  std::vector<std::string> keys;
  std::vector<std::string> values;  // of compare set: expected, desired
  int64_t number = 0;               // of add: the addend; the magic; the ping's number
};

// Limits of the memory that clients can make the server use. TcpStoreServer copies the limits, and
// drops a client whose request exceeds one. LibTorch's own server refuses keys above 8 KiB and
// values above 8 MiB.
struct TcpStoreLimits {
  size_t max_key_bytes = size_t{64} << 10;
  size_t max_value_bytes = size_t{64} << 20;
  size_t max_keys_per_request = size_t{128} << 10;
  size_t max_reply_bytes = size_t{256} << 20;
  // The keys, values, queues and waits of all clients together.
  size_t max_stored_bytes = size_t{1} << 30;
  // The unfinished requests and unread replies of all clients together.
  size_t max_buffered_bytes = size_t{1} << 30;
  int max_clients = 16384;  // and at most half as many as the process may open files
};

// Estimated bytes of an entry of a map or a list besides its text. They count towards the limits.
inline constexpr size_t kTcpStoreEntryBytes = 128;

// Splits the bytes of one client into requests. The pieces may have any size. No byte is parsed
// twice, and an announced length reserves no memory.
//
// Thread-compatible.
class TcpStoreParser {
 public:
  // `limits` is not owned and must outlive the parser.
  explicit TcpStoreParser(const TcpStoreLimits* limits);

  // Adds bytes of the client.
  void Append(const char* data, size_t size);

  // Returns the next request; nullopt: more bytes are needed. kInvalidArgument: the bytes are not a
  // request, or the request exceeds the limits. Do not use the parser after an error.
  absl::StatusOr<std::optional<TcpStoreRequest>> Next();

  // Returns the bytes in memory: unparsed ones, and the fields of an unfinished request.
  size_t held_bytes() const { return input_.size() + field_.capacity() + request_bytes_; }

 private:
  // Both functions return false when more bytes are needed.
  bool TakeNumber(size_t size, uint64_t& number);
  absl::StatusOr<bool> TakeString(size_t limit, const char* what);

  absl::StatusOr<bool> TakeField(char field);
  absl::Status BeginRequest(uint8_t query);
  TcpStoreRequest EndRequest();

  const TcpStoreLimits* const limits_;
  std::string input_;
  size_t offset_ = 0;  // of the first unparsed byte in `input_`

  const char* fields_ = nullptr;  // the current request's fields still to come; nullptr: no request
  const char* repeated_ = nullptr;
  uint64_t repeats_ = 0;  // how often `repeated_` is still to come
  TcpStoreRequest request_;
  size_t request_bytes_ = 0;
  bool in_string_ = false;
  uint64_t missing_bytes_ = 0;  // of the current string
  std::string field_;
};

// These functions append to `out` in the form of the wire.
void AppendNumber(std::string& out, int64_t number);
void AppendString(std::string& out, const std::string& text);
void AppendQuery(std::string& out, TcpStoreQuery query);

// Returns the first bytes of a client: a validation and a ping. The server's reply is their last
// four bytes.
std::string TcpStoreGreeting(uint32_t number);

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_TCP_STORE_PROTOCOL_H_
