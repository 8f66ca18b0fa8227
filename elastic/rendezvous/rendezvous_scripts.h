#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_SCRIPTS_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_SCRIPTS_H_

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "store/redis/redis_script.h"

namespace ddp::elastic {

// The Lua scripts by which agents change a job. Redis runs one at a time.
// docs/rendezvous-protocol.md explains them. The head of scripts/<name>.lua explains a script's
// arguments and replies; prelude.lua explains those that all scripts but kOpenInstance have. They
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

// An argument of a script, which the script reads as args.name. One table in the .cc file lists the
// names of each script: it makes the texts to send, and the first lines of the script, which read
// them. A script that reads a name without an argument fails.
struct ScriptArgument {
  const char* name;
  std::string value;
};

// Returns the arguments as the script expects them in ARGV. CHECKs that each of the script's names
// is given once, and that no other name is given.
std::vector<std::string> EncodeArguments(ScriptName script,
                                         const std::vector<ScriptArgument>& arguments);

// Returns the index in ARGV, counted from 0, of an argument. CHECKs that the script has it.
size_t ArgumentIndex(ScriptName script, absl::string_view name);

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
