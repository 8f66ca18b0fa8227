#include "store/redis/redis_errors.h"

#include <string.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ddp::store {
namespace {

constexpr char kHowToSetPassword[] =
    "set DDP_REDIS_PASSWORD_FILE or DDP_REDIS_PASSWORD, and DDP_REDIS_USER where the user is not "
    "'default'";

// Returns the refusal of the command within a script. Redis before 7 wraps it: "ERR Error running
// script (call to f_5e2a...): @user_script:3: @user_script: 3: -READONLY You can't write ...".
absl::string_view Unwrapped(absl::string_view error_reply) {
  if (!absl::StartsWith(error_reply, "ERR Error running script")) return error_reply;
  constexpr absl::string_view kBegin = ": -";
  const size_t found = error_reply.find(kBegin);
  return found == error_reply.npos ? error_reply : error_reply.substr(found + kBegin.size());
}

// Returns true for the refusal of a command that a script called: "ERR The user executing the
// script can't run this command ...".
bool IsRefusalWithinScript(const std::string& text) {
  return absl::StrContains(text, "The user executing the script can't ");
}

// Returns true when the user may not run EVAL. Redis 6 and 7 quote the command in different
// sentences.
bool SaysNoEval(const std::string& text) {
  return absl::StartsWith(text, "NOPERM") && absl::StrContains(text, "'eval'");
}

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
  if (SaysNoEval(text)) {
    return absl::FailedPreconditionError(absl::StrCat(
        message,
        ": the server does not know this program's scripts, and this user may not send them: where "
        "ddprun started the server, build ddprun and the trainers of all nodes from one version; "
        "elsewhere, allow EVAL (docs/rendezvous-protocol.md)"));
  }
  if (IsUnknownScript(text)) return absl::NotFoundError(message);
  if (absl::StartsWith(text, "NOPERM") || IsRefusalWithinScript(text)) {
    return absl::PermissionDeniedError(message);
  }
  if (absl::StartsWith(Unwrapped(text), "OOM")) return absl::ResourceExhaustedError(message);
  if (IsTransientRefusal(text)) return absl::UnavailableError(message);
  return absl::FailedPreconditionError(message);
}

bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

bool IsTransientRefusal(const std::string& error_reply) {
  // Each of these refuses a script's first write, so no part of the script was applied. MISCONF:
  // the disk is full, and the server refuses writes until it is not.
  const absl::string_view reason = Unwrapped(error_reply);
  for (const char* prefix : {"LOADING", "BUSY ", "MASTERDOWN", "READONLY", "MISCONF", "CLUSTERDOWN",
                             "TRYAGAIN", "NOREPLICAS", "ERR max number of clients"}) {
    if (absl::StartsWith(reason, prefix)) return true;
  }
  return false;
}

bool IsReplicaRefusal(const std::string& error_reply) {
  const absl::string_view reason = Unwrapped(error_reply);
  return absl::StartsWith(reason, "READONLY") || absl::StartsWith(reason, "MASTERDOWN");
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
