#ifndef DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_
#define DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_

namespace ddp::testing {

// Names of environment variables: what a rank is told by whoever starts it.
inline constexpr char kOracleTable[] = "DDP_ORACLE_TABLE";      // the path of scenarios.json
inline constexpr char kOracleModels[] = "DDP_ORACLE_MODELS";    // of models.safetensors
inline constexpr char kOracleResults[] = "DDP_ORACLE_RESULTS";  // the folder to write to

// The body of a rank: takes every scenario of the table through our DistributedDataParallel, and
// writes tensors_RANK.safetensors and facts_RANK.json, with this rank's values under the names that
// README.md gives. Of a scenario that threw, the facts have its "error". Returns 0.
int RunOracleScenarios();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_
