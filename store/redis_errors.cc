#include "store/redis_errors.h"

#include <string.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::store {
namespace {

constexpr char kHowToSetPassword[] =
    "set DDP_REDIS_PASSWORD_FILE or DDP_REDIS_PASSWORD, and DDP_REDIS_USER where the user is not "
    "'default'";

bool SaysNoPasswordIsConfigured(const std::string& text) {
  return absl::StrContains(text, "without any password configured");
}

}  // namespace

absl::Status StatusOfErrorReply(const std::string& text, const RedisEndpoint& endpoint) {
  const std::string message = absl::StrCat("Redis at ", endpoint.DebugString(), ": ", text);
  if (absl::StartsWith(text, "NOAUTH")) {
    return absl::UnauthenticatedError(
        absl::StrCat(message, ": the server wants a password: ", kHowToSetPassword));
  }
  if (absl::StartsWith(text, "WRONGPASS")) {
    return absl::UnauthenticatedError(
        absl::StrCat(message, ": user or password is wrong: ", kHowToSetPassword));
  }
  if (SaysNoPasswordIsConfigured(text)) {
    return absl::UnauthenticatedError(absl::StrCat(
        message,
        ": this server has no password: unset DDP_REDIS_PASSWORD, DDP_REDIS_PASSWORD_FILE"));
  }
  if (absl::StartsWith(text, "NOPERM")) return absl::PermissionDeniedError(message);
  if (absl::StartsWith(text, "OOM")) return absl::ResourceExhaustedError(message);
  if (IsPassingRefusal(text)) return absl::UnavailableError(message);
  return absl::FailedPreconditionError(message);
}

bool IsPassingRefusal(const std::string& error_reply) {
  // MISCONF: its disk is full, and it refuses writes until it is not.
  for (const char* prefix : {"LOADING", "BUSY ", "MASTERDOWN", "READONLY", "MISCONF", "CLUSTERDOWN",
                             "TRYAGAIN", "NOREPLICAS", "ERR max number of clients"}) {
    if (absl::StartsWith(error_reply, prefix)) return true;
  }
  return false;
}

bool IsUnknownScript(const std::string& error_reply) {
  return absl::StartsWith(error_reply, "NOSCRIPT");
}

bool IsTransactionAborted(const std::string& error_reply) {
  return absl::StartsWith(error_reply, "EXECABORT");
}

absl::Status ConnectionError(const char* what, const RedisEndpoint& endpoint, int error_number) {
  return absl::UnavailableError(
      absl::StrCat(what, " Redis at ", endpoint.DebugString(), ": ", strerror(error_number)));
}

}  // namespace ddp::store
