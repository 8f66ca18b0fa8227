#include "store/tcp_store/tcp_store_protocol.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::store {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire has the clients' byte order");

// A request's fields: k a key, v a value, n a number, u a number of four bytes, * a count. The
// fields after '*' are repeated as often as the count says.
constexpr const char* kFields[] = {
    "u",    // kValidate
    "kv",   // kSet
    "kvv",  // kCompareSet
    "k",    // kGet
    "kn",   // kAdd
    "*k",   // kCheck
    "*k",   // kWait
    "",     // kKeyCount
    "k",    // kDelete
    "kv",   // kAppend
    "*k",   // kMultiGet
    "*kv",  // kMultiSet
    "",     // kCancelWait
    "u",    // kPing
    "kv",   // kQueuePush
    "k",    // kQueuePop
    "k",    // kQueueLength
    "",     // kListKeys
};

// When this many parsed bytes have gathered, they are removed and the rest is moved.
constexpr size_t kCompactBytes = 4096;

}  // namespace

TcpStoreParser::TcpStoreParser(const TcpStoreLimits* limits) : limits_(limits) {}

void TcpStoreParser::Append(const char* data, size_t size) {
  if (offset_ == input_.size()) {
    input_.clear();
    offset_ = 0;
  } else if (offset_ >= kCompactBytes) {
    input_.erase(0, offset_);
    offset_ = 0;
  }
  input_.append(data, size);
}

bool TcpStoreParser::TakeNumber(size_t size, uint64_t& number) {
  if (input_.size() - offset_ < size) return false;
  number = 0;
  std::memcpy(&number, input_.data() + offset_, size);
  offset_ += size;
  return true;
}

absl::StatusOr<bool> TcpStoreParser::TakeString(size_t limit, const char* what) {
  if (!in_string_) {
    if (!TakeNumber(sizeof(missing_bytes_), missing_bytes_)) return false;
    if (missing_bytes_ > limit) {
      return absl::InvalidArgumentError(
          absl::StrCat("a ", what, " of ", missing_bytes_, " bytes; at most ", limit, " may be"));
    }
    in_string_ = true;
  }
  const size_t size = std::min<uint64_t>(missing_bytes_, input_.size() - offset_);
  field_.append(input_, offset_, size);
  offset_ += size;
  missing_bytes_ -= size;
  if (missing_bytes_ > 0) return false;
  in_string_ = false;
  request_bytes_ += field_.size() + kTcpStoreEntryBytes;
  return true;
}

absl::StatusOr<bool> TcpStoreParser::TakeField(char field) {
  uint64_t number = 0;
  switch (field) {
    case 'u':
    case 'n':
      if (!TakeNumber(field == 'u' ? sizeof(uint32_t) : sizeof(uint64_t), number)) return false;
      request_.number = static_cast<int64_t>(number);
      return true;
    case '*':
      if (!TakeNumber(sizeof(number), number)) return false;
      if (number > limits_->max_keys_per_request) {
        return absl::InvalidArgumentError(absl::StrCat("a request of ", number, " keys; at most ",
                                                       limits_->max_keys_per_request, " may be"));
      }
      repeats_ = number;
      return true;
    default: {
      const bool is_key = field == 'k';
      DDP_ASSIGN_OR_RETURN(const bool whole,
                           TakeString(is_key ? limits_->max_key_bytes : limits_->max_value_bytes,
                                      is_key ? "key" : "value"));
      if (!whole) return false;
      (is_key ? request_.keys : request_.values).push_back(std::exchange(field_, {}));
      if (request_bytes_ > limits_->max_buffered_bytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("a request of more than ", limits_->max_buffered_bytes, " bytes"));
      }
      return true;
    }
  }
}

absl::Status TcpStoreParser::BeginRequest(uint8_t query) {
  if (query >= std::size(kFields)) {
    return absl::InvalidArgumentError(absl::StrCat("a request of the unknown kind ", query));
  }
  request_.query = static_cast<TcpStoreQuery>(query);
  fields_ = kFields[query];
  return absl::OkStatus();
}

TcpStoreRequest TcpStoreParser::EndRequest() {
  fields_ = repeated_ = nullptr;
  request_bytes_ = 0;
  return std::exchange(request_, {});
}

absl::StatusOr<std::optional<TcpStoreRequest>> TcpStoreParser::Next() {
  if (fields_ == nullptr) {
    if (offset_ == input_.size()) return std::nullopt;
    DDP_RETURN_IF_ERROR(BeginRequest(static_cast<uint8_t>(input_[offset_++])));
  }
  while (true) {
    if (*fields_ == '\0') {
      // The repeated fields were read once more, or there are none.
      if (repeated_ == nullptr || repeats_ <= 1) return EndRequest();
      --repeats_;
      fields_ = repeated_;
    }
    const char field = *fields_;
    DDP_ASSIGN_OR_RETURN(const bool whole, TakeField(field));
    if (!whole) return std::nullopt;
    ++fields_;
    if (field != '*') continue;
    repeated_ = fields_;
    if (repeats_ == 0) return EndRequest();
  }
}

void AppendNumber(std::string& out, int64_t number) {
  char bytes[sizeof(number)];
  std::memcpy(bytes, &number, sizeof(number));
  out.append(bytes, sizeof(bytes));
}

void AppendString(std::string& out, const std::string& text) {
  AppendNumber(out, static_cast<int64_t>(text.size()));
  out.append(text);
}

void AppendQuery(std::string& out, TcpStoreQuery query) { out.push_back(static_cast<char>(query)); }

std::string TcpStoreGreeting(uint32_t number) {
  std::string out;
  char bytes[sizeof(number)];
  AppendQuery(out, TcpStoreQuery::kValidate);
  std::memcpy(bytes, &kTcpStoreMagic, sizeof(kTcpStoreMagic));
  out.append(bytes, sizeof(bytes));
  AppendQuery(out, TcpStoreQuery::kPing);
  std::memcpy(bytes, &number, sizeof(number));
  out.append(bytes, sizeof(bytes));
  return out;
}

}  // namespace ddp::store
