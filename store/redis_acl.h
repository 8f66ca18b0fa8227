// What a user of Redis must be allowed to run jobs, and nothing more.
#ifndef DDP_STORE_REDIS_ACL_H_
#define DDP_STORE_REDIS_ACL_H_

#include <string>

namespace ddp::store {

// The rules of an ACL user, as they stand in `user NAME on >PASSWORD <rules>` of redis.conf or in
// ACL SETUSER, for the agents and workers of one job: its keys and channels, and the commands that
// the rendezvous' scripts, RedisStore and `ddprun status` use. Whatever the user was allowed before
// is taken away; its passwords stay.
//
// A blank in a run id cannot be told in redis.conf: it becomes `?`, any character.
std::string JobAclRules(const std::string& run_id);

// The same for all jobs, for a server that serves nothing else and has loaded the scripts itself
// (PrivateRedisServer::Options::scripts). Clients may run these by name; EVAL and SCRIPT are
// denied.
std::string AllJobsAclRules();

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_ACL_H_
