#include "ddp/common/worker_environment.h"

#include <limits>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::internal {
namespace {

// Reads the variables and collects the problems of all of them.
class Reader {
 public:
  explicit Reader(const VariableGetter& get) : get_(get) {}

  std::string Text(const std::string& name) const {
    const std::optional<std::string> value = get_(name);
    return value.has_value() ? *value : "";
  }

  template <typename Integer>
  Integer Required(const std::string& name, int64_t low, int64_t high) {
    if (Text(name).empty()) {
      problems_.push_back(absl::StrCat(name, " is not set"));
      return static_cast<Integer>(low);
    }
    return Optional<Integer>(name, low, low, high);
  }

  template <typename Integer>
  Integer Optional(const std::string& name, Integer unset, int64_t low, int64_t high) {
    const std::string text = Text(name);
    if (text.empty()) return unset;
    int64_t value = 0;
    if (!absl::SimpleAtoi(text, &value)) {
      problems_.push_back(absl::StrCat(name, "=\"", text, "\" is not a whole number"));
      return unset;
    }
    if (value < low || value > high) {
      problems_.push_back(absl::StrCat(name, "=", value, " must be in ", low, "..", high));
      return unset;
    }
    return static_cast<Integer>(value);
  }

  void Check(bool holds, const std::string& problem) {
    if (!holds) problems_.push_back(problem);
  }

  absl::Status Result() const {
    if (problems_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "the environment of this rank is not complete: ", absl::StrJoin(problems_, "; "),
        ". Start the program with ddprun: ddprun --nproc-per-node=2 PROGRAM"));
  }

 private:
  const VariableGetter& get_;
  std::vector<std::string> problems_;
};

constexpr int kMaxWorldSize = 1 << 24;

}  // namespace

absl::StatusOr<WorkerEnvironment> WorkerEnvironment::FromEnvironment() {
  return Parse(&EnvironmentVariable);
}

absl::StatusOr<WorkerEnvironment> WorkerEnvironment::Parse(const VariableGetter& get) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  Reader reader(get);
  WorkerEnvironment env;
  env.world_size = reader.Required<int>("WORLD_SIZE", 1, kMaxWorldSize);
  env.rank = reader.Required<int>("RANK", 0, kMaxWorldSize);
  env.local_rank = reader.Optional<int>("LOCAL_RANK", env.rank, 0, kMaxWorldSize);
  env.has_local_rank = !reader.Text("LOCAL_RANK").empty();
  env.local_world_size = reader.Optional<int>("LOCAL_WORLD_SIZE", 0, 1, kMaxWorldSize);
  reader.Check(env.rank < env.world_size || env.world_size <= 0,
               absl::StrCat("RANK=", env.rank, " must be below WORLD_SIZE=", env.world_size));
  reader.Check(env.local_world_size == 0 || env.local_rank < env.local_world_size,
               absl::StrCat("LOCAL_RANK=", env.local_rank,
                            " must be below LOCAL_WORLD_SIZE=", env.local_world_size));

  env.store_url = reader.Text("DDP_STORE");
  env.master_addr = reader.Text("MASTER_ADDR");
  env.master_port = reader.Optional<int>("MASTER_PORT", 0, 1, 65535);
  if (env.store_url.empty()) {
    reader.Check(!env.master_addr.empty(), "neither DDP_STORE nor MASTER_ADDR is set");
    reader.Check(env.master_addr.empty() || !reader.Text("MASTER_PORT").empty(),
                 "MASTER_PORT is not set");
  }
  env.agent_store = reader.Text("TORCHELASTIC_USE_AGENT_STORE") == "True";

  env.generation = reader.Optional<uint64_t>("DDP_GENERATION", 0, 0, kMax);
  env.generation_nonce = reader.Text("DDP_GENERATION_NONCE");
  env.restart_count = reader.Optional<int64_t>("TORCHELASTIC_RESTART_COUNT", 0, 0, kMax);
  env.max_restarts = reader.Optional<int64_t>("TORCHELASTIC_MAX_RESTARTS", 0, 0, kMax);
  env.run_id = reader.Text("TORCHELASTIC_RUN_ID");
  env.health_fd = reader.Optional<int>("DDP_HEALTH_FD", -1, 0, 1 << 20);

  const absl::Status status = reader.Result();
  if (!status.ok()) return status;
  return env;
}

}  // namespace ddp::internal
