#ifndef DDP_TESTING_ORACLE_SCENARIO_H_
#define DDP_TESTING_ORACLE_SCENARIO_H_

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::testing {

// A training run that the C++ runner and PyTorch both make, read from scenarios.json. README.md
// describes the fields. A value.
struct Scenario {
  std::string name;
  std::string model;

  // Fields of DistributedDataParallelOptions.
  bool broadcast_buffers = true;
  std::optional<double> bucket_cap_mb;
  std::vector<double> bucket_cap_mb_list;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;

  std::string hook;         // name of a comm hook, or empty
  bool accumulate = false;  // runs a backward under no_sync() before each synchronized one
  bool set_to_none = true;  // argument of zero_grad()
  bool finalize = false;    // require_manual_backward_finalization, and finalize_backward()
  double momentum = 0.9;

  // Shards the optimizer: "whole", "even", or "scatter" (even, with scattered gradients). Empty:
  // the plain optimizer. PyTorch runs its ZeroRedundancyOptimizer.
  std::string zero;
  // PyTorch's scenario whose values these must be; empty: this one.
  std::string like;

  std::vector<int> batches;  // steps of each rank inside join(); empty: no join
  bool divide_by_initial_world_size = true;

  const std::string& PyTorchName() const { return like.empty() ? name : like; }
  int StepsOf(int rank) const;
  // Returns the rank whose gradients are compared with PyTorch's: the lowest with most steps.
  int RecordedRank(int world_size) const;

  friend std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
    return out << scenario.name;
  }
};

// Number of steps of every rank in scenarios without a join.
inline constexpr int kOracleSteps = 5;
inline constexpr double kOracleLearningRate = 0.1;

// Parses the table. Errors: kInvalidArgument, which names the field, for an invalid table.
absl::StatusOr<std::vector<Scenario>> ParseScenarios(const std::string& json);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_SCENARIO_H_
