#include "store/redis_store/redis_store.h"

#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "c10/util/Exception.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis_store/redis_key_value_store.h"

namespace ddp::store {
namespace {

// Without LibTorch's stack trace: callers log what() as one line.
[[noreturn]] void Throw(const absl::Status& status) {
  const std::string message = "RedisStore: " + std::string(status.message());
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      throw c10::DistNetworkError(message, /*backtrace=*/nullptr);
    case absl::StatusCode::kInvalidArgument:
      throw c10::ValueError(message, /*backtrace=*/nullptr);
    default:
      throw c10::DistStoreError(message, /*backtrace=*/nullptr);
  }
}

void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) Throw(status);
}

template <typename T>
T ValueOrThrow(absl::StatusOr<T> result) {
  if (!result.ok()) Throw(result.status());
  return *std::move(result);
}

absl::Duration ToDuration(std::chrono::milliseconds timeout) {
  if (timeout == c10d::Store::kNoTimeout) return absl::InfiniteDuration();
  return absl::FromChrono(timeout);
}

std::string ToString(const std::vector<uint8_t>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

std::vector<uint8_t> ToBytes(const std::string& text) {
  return std::vector<uint8_t>(text.begin(), text.end());
}

// Returns the name that CLIENT LIST shows to the operator: "ddp-rank-3".
std::string ClientName() {
  const char* const rank = std::getenv("RANK");
  int number = 0;
  if (rank == nullptr || !absl::SimpleAtoi(rank, &number)) return "ddp";
  return absl::StrCat("ddp-rank-", number);
}

std::shared_ptr<RedisKeyValueStore> Connect(const StoreAddress& address,
                                            std::chrono::milliseconds timeout) {
  RedisKeyValueStore::Options options;
  options.connection.total_timeout = ToDuration(timeout);
  options.connection.client_name = ClientName();
  return ValueOrThrow(RedisKeyValueStore::Connect(address, options));
}

}  // namespace

RedisStore::RedisStore(const StoreAddress& address, std::chrono::milliseconds timeout)
    : RedisStore(Connect(address, timeout), timeout) {}

RedisStore::RedisStore(std::shared_ptr<RedisKeyValueStore> store, std::chrono::milliseconds timeout)
    : Store(timeout), store_(std::move(store)), timeout_ms_(timeout.count()) {}

RedisStore::~RedisStore() = default;

c10::intrusive_ptr<RedisStore> RedisStore::connect(const std::string& url,
                                                   std::chrono::milliseconds timeout) {
  StoreAddress address = ValueOrThrow(ParseStoreAddress(url));
  ThrowIfError(ApplyRedisCredentialsFromEnvironment(address.endpoint));
  return c10::make_intrusive<RedisStore>(address, timeout);
}

c10::intrusive_ptr<c10d::Store> RedisStore::clone() {
  return c10::intrusive_ptr<RedisStore>::unsafe_steal_from_new(new RedisStore(store_, Timeout()));
}

const StoreAddress& RedisStore::address() const { return store_->address(); }

void RedisStore::setTimeout(const std::chrono::milliseconds& timeout) {
  Store::setTimeout(timeout);
  timeout_ms_ = timeout.count();
}

std::chrono::milliseconds RedisStore::Timeout() const {
  return std::chrono::milliseconds(timeout_ms_.load());
}

void RedisStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ThrowIfError(store_->Set(key, ToString(value), ToDuration(Timeout())));
}

std::vector<uint8_t> RedisStore::compareSet(const std::string& key,
                                            const std::vector<uint8_t>& expected,
                                            const std::vector<uint8_t>& desired) {
  return ToBytes(ValueOrThrow(
      store_->CompareSet(key, ToString(expected), ToString(desired), ToDuration(Timeout()))));
}

std::vector<uint8_t> RedisStore::get(const std::string& key) {
  return ToBytes(ValueOrThrow(store_->Get(key, ToDuration(Timeout()))));
}

int64_t RedisStore::add(const std::string& key, int64_t value) {
  return ValueOrThrow(store_->Add(key, value, ToDuration(Timeout())));
}

bool RedisStore::deleteKey(const std::string& key) {
  return ValueOrThrow(store_->Delete(key, ToDuration(Timeout())));
}

bool RedisStore::check(const std::vector<std::string>& keys) {
  return ValueOrThrow(store_->Check(keys, ToDuration(Timeout())));
}

int64_t RedisStore::getNumKeys() { return ValueOrThrow(store_->NumKeys(ToDuration(Timeout()))); }

void RedisStore::wait(const std::vector<std::string>& keys) {
  ThrowIfError(store_->Wait(keys, ToDuration(Timeout())));
}

void RedisStore::wait(const std::vector<std::string>& keys,
                      const std::chrono::milliseconds& timeout) {
  ThrowIfError(store_->Wait(keys, ToDuration(timeout)));
}

void RedisStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  ThrowIfError(store_->Append(key, ToString(value), ToDuration(Timeout())));
}

std::vector<std::vector<uint8_t>> RedisStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<std::vector<uint8_t>> values;
  values.reserve(keys.size());
  for (const std::string& value : ValueOrThrow(store_->MultiGet(keys, ToDuration(Timeout())))) {
    values.push_back(ToBytes(value));
  }
  return values;
}

void RedisStore::multiSet(const std::vector<std::string>& keys,
                          const std::vector<std::vector<uint8_t>>& values) {
  std::vector<std::string> texts;
  texts.reserve(values.size());
  for (const std::vector<uint8_t>& value : values) texts.push_back(ToString(value));
  ThrowIfError(store_->MultiSet(keys, texts, ToDuration(Timeout())));
}

void RedisStore::queuePush(const std::string& key, const std::vector<uint8_t>& value) {
  ThrowIfError(store_->QueuePush(key, ToString(value), ToDuration(Timeout())));
}

std::vector<uint8_t> RedisStore::queuePop(const std::string& key, bool block) {
  if (block) return ToBytes(ValueOrThrow(store_->QueuePop(key, ToDuration(Timeout()))));
  const std::optional<std::string> value =
      ValueOrThrow(store_->QueueTryPop(key, ToDuration(Timeout())));
  if (!value.has_value()) {
    C10_THROW_ERROR(DistQueueEmptyError, "RedisStore: queue " + key + " is empty");
  }
  return ToBytes(*value);
}

int64_t RedisStore::queueLen(const std::string& key) {
  return ValueOrThrow(store_->QueueLength(key, ToDuration(Timeout())));
}

std::vector<std::string> RedisStore::listKeys() {
  return ValueOrThrow(store_->ListKeys(ToDuration(Timeout())));
}

void RedisStore::refresh_ttl() { ThrowIfError(store_->RefreshTtl(ToDuration(Timeout()))); }

}  // namespace ddp::store
