#ifndef DDP_STORE_REDIS_SENTINEL_H_
#define DDP_STORE_REDIS_SENTINEL_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {

// Asks the endpoint's Redis Sentinels, one after the other, for the address of its master, until
// one knows it. Returns that address with its port: "10.0.0.1:6379", "[fd00::1]:6379". Where
// Sentinel announces a host name, there is one for each address of the name. A sentinel that
// demands a password gets the endpoint's.
//
// Blocks: for at most a second for each sentinel, and for the lookups of names. kUnavailable: none
// of them knows the master; the message has the last one's reason.
absl::StatusOr<std::vector<std::string>> AskSentinels(const RedisEndpoint& endpoint);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SENTINEL_H_
