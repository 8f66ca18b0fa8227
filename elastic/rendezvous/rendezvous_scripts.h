#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_SCRIPTS_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_SCRIPTS_H_

#include <array>
#include <functional>
#include <string>

#include "store/redis/redis_script.h"

namespace ddp::elastic {

// The Lua scripts by which agents change a job. Redis runs one at a time.
// docs/rendezvous-protocol.md explains them. The head of scripts/<name>.lua lists a script's own
// arguments and replies. All but kOpenInstance also have the arguments listed in prelude.lua. They
// also find the nodes that are lost, those whose lease has expired (scripts/leases.lua).
enum class ScriptName {
  kOpenInstance,
  kJoin,
  kHeartbeat,
  kReportFailure,
  kComplete,
  kDrain,
  kTakeBack,
  kLeave,
  kClose,
};
inline constexpr int kScriptCount = 9;

// Returns "open_instance", "join", ...
const char* ToString(ScriptName name);

// The sources of the scripts, as sent to Redis. Immutable; one object serves any number of clients.
class RendezvousScripts {
 public:
  // `edit` is for tests: it maps a script's source to the text that is sent instead.
  explicit RendezvousScripts(
      const std::function<std::string(ScriptName, std::string)>& edit = nullptr);

  const store::RedisScript& operator[](ScriptName name) const {
    return scripts_[static_cast<int>(name)];
  }

 private:
  std::array<store::RedisScript, kScriptCount> scripts_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_SCRIPTS_H_
