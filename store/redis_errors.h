// Redis's error replies and the system's, as absl::Status: the one place where they are translated.
#ifndef DDP_STORE_REDIS_ERRORS_H_
#define DDP_STORE_REDIS_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "store/redis_endpoint.h"

namespace ddp::store {

// The status for an error reply `text` ("WRONGPASS invalid ...") of the server at `endpoint`; the
// codes are those that RedisConnection documents, and kNotFound where the server does not know a
// script. The message names the server and, where there is one, the cure.
absl::Status StatusOfErrorReply(const std::string& text, const RedisEndpoint& endpoint);

// Whether it may be otherwise a little later: no connection, or no reply in time.
bool IsPassing(const absl::Status& status);

// Whether the server refused a command, without applying any of it, for a reason that passes: it is
// loading its data, running a script, became a replica, has too many clients.
bool IsPassingRefusal(const std::string& error_reply);

// Whether the server refused a command because it is a replica: the master is elsewhere.
bool IsReplicaRefusal(const std::string& error_reply);

// Whether the server does not know the script of an EVALSHA.
bool IsUnknownScript(const std::string& error_reply);

// Whether it is EXEC's answer to a transaction of which a command was refused, so that none was
// applied.
bool IsTransactionAborted(const std::string& error_reply);

// kUnavailable: "<what> Redis at <endpoint>: <text of error_number>".
absl::Status ConnectionError(const char* what, const RedisEndpoint& endpoint, int error_number);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_ERRORS_H_
