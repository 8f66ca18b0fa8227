// The translation of Redis's error replies and of system errors into absl::Status. No other file
// does this.
#ifndef DDP_STORE_REDIS_REDIS_ERRORS_H_
#define DDP_STORE_REDIS_REDIS_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {

// Returns the status for an error reply `text` ("WRONGPASS invalid ...") of the server at
// `endpoint`. The codes are those that RedisCaller documents, and kNotFound when the server does
// not know a script. The message names the server and, where one is known, the remedy.
absl::Status StatusOfErrorReply(const std::string& text, const RedisEndpoint& endpoint);

// Returns true when another attempt may succeed: there was no connection (kUnavailable) or no reply
// in time (kDeadlineExceeded).
bool IsTransient(const absl::Status& status);

// Returns true when the server refused a command for a transient reason and applied no part of it:
// the server is loading its data, running a script, became a replica, or has too many clients.
bool IsTransientRefusal(const std::string& error_reply);

// Returns true when the server refused a command because it is a replica: the master is elsewhere.
bool IsReplicaRefusal(const std::string& error_reply);

// Returns true when the server does not know the script of an EVALSHA.
bool IsUnknownScript(const std::string& error_reply);

// Returns true for EXEC's reply to a transaction of which a command was refused, so that no command
// was applied.
bool IsTransactionAborted(const std::string& error_reply);

// Returns kUnavailable with the text "<what> Redis at <endpoint>: <text of error_number>".
absl::Status ConnectionError(const char* what, const RedisEndpoint& endpoint, int error_number);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_ERRORS_H_
