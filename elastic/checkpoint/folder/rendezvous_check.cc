#include "elastic/checkpoint/folder/rendezvous_check.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

// Returns "" when the reply is nil or not a text.
std::string TextOf(const store::RedisReply& reply) {
  absl::StatusOr<std::string> text = reply.AsString();
  return text.ok() ? *std::move(text) : "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<RendezvousCheck>> RendezvousCheck::Of(const std::string& store_url,
                                                                     absl::Duration timeout) {
  DDP_ASSIGN_OR_RETURN(store::StoreAddress address, store::ParseStoreAddress(store_url));
  auto check = std::unique_ptr<RendezvousCheck>(new RendezvousCheck());
  // ddp:{RUN_ID}:i<instance>:g<generation>.<nonce>:store:
  absl::string_view rest = address.prefix;
  const bool is_store = absl::ConsumeSuffix(&rest, ":store:");
  const size_t generation_at = rest.rfind(":g");
  const size_t instance_at =
      generation_at == absl::string_view::npos ? generation_at : rest.rfind(":i", generation_at);
  const size_t dot = rest.find('.', generation_at == absl::string_view::npos ? 0 : generation_at);
  if (!is_store || instance_at == absl::string_view::npos || dot == absl::string_view::npos ||
      !absl::SimpleAtoi(rest.substr(instance_at + 2, generation_at - instance_at - 2),
                        &check->instance_) ||
      !absl::SimpleAtoi(rest.substr(generation_at + 2, dot - generation_at - 2),
                        &check->generation_)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the prefix \"", address.prefix, "\" is not that of a generation's store"));
  }
  check->nonce_ = std::string(rest.substr(dot + 1));
  check->job_key_ = absl::StrCat(rest.substr(0, generation_at), ":job");
  DDP_RETURN_IF_ERROR(store::ApplyRedisCredentialsFromEnvironment(address.endpoint));
  check->connection_ = store::RedisConnection::Unconnected(
      address.endpoint,
      {.connect_timeout = timeout, .command_timeout = timeout, .total_timeout = timeout});
  return check;
}

absl::StatusOr<std::string> RendezvousCheck::Ask() {
  const absl::StatusOr<store::RedisReply> reply = connection_->Command(
      {"HMGET", job_key_, "token", "generation", "nonce", "state"}, {.idempotent = true});
  connection_->Disconnect();
  DDP_RETURN_IF_ERROR(reply.status());
  DDP_ASSIGN_OR_RETURN(const absl::Span<const store::RedisReply> fields, reply->AsArray());
  if (fields.size() != 4) return absl::InternalError("the rendezvous answers something else");
  const std::string token = TextOf(fields[0]);
  const std::string nonce = TextOf(fields[2]);
  uint64_t generation = 0;
  if (token.empty() || !absl::SimpleAtoi(TextOf(fields[1]), &generation) ||
      generation < generation_) {
    return absl::NotFoundError(
        absl::StrCat("the rendezvous knows nothing of generation ", generation_));
  }
  if (generation > generation_ || nonce != nonce_) {
    return absl::FailedPreconditionError(absl::StrCat("the job's rendezvous is at generation ",
                                                      generation, " (", nonce, ") already"));
  }
  if (TextOf(fields[3]) == "ended") {
    return absl::FailedPreconditionError("the job has ended, the rendezvous says");
  }
  return token;
}

}  // namespace ddp::elastic
