#include "store/redis/wire/redis_reply_reader.h"

#include <hiredis/read.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::store {

// The callbacks of hiredis, which parses. They build RedisReply values straight from its buffer,
// without a redisReply in between. An element is added when its bytes have come, never earlier.
struct RedisReplyReader::Builder {
  struct FreeReader {
    void operator()(redisReader* reader) const { redisReaderFree(reader); }
  };

  explicit Builder(const Limits& limits) : limits(limits) {
    functions.createString = &CreateString;
    functions.createArray = &CreateArray;
    functions.createInteger = &CreateInteger;
    functions.createNil = &CreateNil;
    functions.freeObject = [](void* reply) {};  // `root` owns all replies
    reader.reset(redisReaderCreateWithFunctions(&functions));
    reader->privdata = this;
  }

  // Stores `reply` in its parent array, or as the root, which hiredis returns or frees. Returns
  // nullptr when a limit is exceeded; hiredis reports this as an error.
  static void* Place(const redisReadTask* task, RedisReply reply) {
    auto* self = static_cast<Builder*>(task->privdata);
    if (++self->elements > self->limits.max_reply_elements) {
      self->refusal =
          absl::StrCat("a reply has more than ", self->limits.max_reply_elements, " elements");
      return nullptr;
    }
    if (task->parent == nullptr) {
      self->root = std::move(reply);
      return &self->root;
    }
    auto* parent = static_cast<RedisReply*>(task->parent->obj);
    // No element is added to the parent while this one is built, so the pointer stays valid.
    parent->elements_.push_back(std::move(reply));
    return &parent->elements_.back();
  }

  static void* CreateString(const redisReadTask* task, char* text, size_t size) {
    switch (task->type) {
      case REDIS_REPLY_ERROR:
        return Place(task, RedisReply::Error(std::string(text, size)));
      case REDIS_REPLY_STATUS:
        return Place(task, RedisReply::Status(std::string(text, size)));
      default:
        return Place(task, RedisReply::String(std::string(text, size)));
    }
  }

  static void* CreateArray(const redisReadTask* task, int size) {
    return Place(task, RedisReply::Array({}));
  }

  static void* CreateInteger(const redisReadTask* task, long long value) {
    return Place(task, RedisReply::Integer(value));
  }

  static void* CreateNil(const redisReadTask* task) { return Place(task, RedisReply()); }

  const Limits limits;
  redisReplyObjectFunctions functions{};  // outlives the reader, which points to it
  std::unique_ptr<redisReader, FreeReader> reader;
  RedisReply root;              // the reply that is being read
  size_t elements = 0;          // elements of that reply so far
  size_t unfinished_bytes = 0;  // bytes fed that are not part of a complete reply
  std::string refusal;
};

RedisReplyReader::RedisReplyReader() : RedisReplyReader(Limits()) {}

RedisReplyReader::RedisReplyReader(const Limits& limits)
    : limits_(limits), builder_(std::make_unique<Builder>(limits)) {}

RedisReplyReader::~RedisReplyReader() = default;

void RedisReplyReader::Reset() { builder_ = std::make_unique<Builder>(limits_); }

absl::Status RedisReplyReader::Feed(const char* data, size_t size) {
  if (redisReaderFeed(builder_->reader.get(), data, size) != REDIS_OK) {
    return absl::InternalError(absl::StrCat("reading Redis's reply: ", builder_->reader->errstr));
  }
  builder_->unfinished_bytes += size;
  return absl::OkStatus();
}

absl::StatusOr<bool> RedisReplyReader::Next(RedisReply& reply) {
  redisReader* const reader = builder_->reader.get();
  void* root = nullptr;
  if (redisReaderGetReply(reader, &root) != REDIS_OK) {
    const std::string& refusal = builder_->refusal;
    return absl::InternalError(absl::StrCat("what Redis sent is not a reply to be accepted: ",
                                            refusal.empty() ? reader->errstr : refusal));
  }
  const size_t later_bytes = root == nullptr ? 0 : reader->len - reader->pos;
  if (builder_->unfinished_bytes - later_bytes > limits_.max_reply_bytes) {
    return absl::InternalError(
        absl::StrCat("Redis sent a reply of more than ", limits_.max_reply_bytes, " bytes"));
  }
  if (root == nullptr) return false;
  reply = std::move(builder_->root);
  builder_->elements = 0;
  builder_->unfinished_bytes = later_bytes;
  return true;
}

}  // namespace ddp::store
