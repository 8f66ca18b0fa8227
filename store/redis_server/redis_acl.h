// The rights that a Redis user needs to run jobs, and no more.
#ifndef DDP_STORE_REDIS_SERVER_REDIS_ACL_H_
#define DDP_STORE_REDIS_SERVER_REDIS_ACL_H_

#include <string>

namespace ddp::store {

// Returns the rules of an ACL user for the agents and workers of one job. Their form is that of
// `user NAME on >PASSWORD <rules>` in redis.conf and of ACL SETUSER. The rules allow the keys and
// channels of the job, and the commands that the rendezvous' scripts, RedisStore and `ddprun
// status` use. They remove all earlier rights of the user; its passwords stay. INFO names no key. A
// job trains without INFO as well, but takes a server that a fail-over has changed for the same.
//
// redis.conf cannot express a blank or a control character in a run id. The rules have `?` in its
// place, which matches any character.
std::string JobAclRules(const std::string& run_id);

// Returns the rules for all jobs, for a server that serves nothing else and has loaded the scripts
// itself (PrivateRedisServer::Options::scripts). Clients may run these scripts by name; EVAL and
// SCRIPT are denied.
std::string AllJobsAclRules();

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SERVER_REDIS_ACL_H_
