#ifndef DDP_TESTING_ORACLE_SCENARIO_H_
#define DDP_TESTING_ORACLE_SCENARIO_H_

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::testing {

// A line of the table of runs, scenarios.json, which both sides read; README.md says what the
// fields mean. Pure.
struct Scenario {
  std::string name;
  std::string model;

  // Of DistributedDataParallelOptions.
  bool broadcast_buffers = true;
  std::optional<double> bucket_cap_mb;
  std::vector<double> bucket_cap_mb_list;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;

  std::string hook;         // a comm hook's name; empty: none
  bool accumulate = false;  // a backward under no_sync() before each synchronized one
  bool set_to_none = true;  // how gradients are cleared
  double momentum = 0.9;

  std::vector<int> batches;  // steps of each rank, under a join; empty: equal, without one
  bool divide_by_initial_world_size = true;

  int StepsOf(int rank) const;
  // The rank whose gradients are compared with PyTorch's: the first of those with most steps.
  int RecordedRank(int world_size) const;

  friend std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
    return out << scenario.name;
  }
};

// The steps of a rank in scenarios without a join.
inline constexpr int kOracleSteps = 5;
inline constexpr double kOracleLearningRate = 0.1;

// Errors: kInvalidArgument, naming the field, for what the table should not say.
absl::StatusOr<std::vector<Scenario>> ParseScenarios(const std::string& json);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_SCENARIO_H_
