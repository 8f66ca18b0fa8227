#ifndef DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_
#define DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_

namespace ddp::testing {

// Names of the environment variables that the test sets for a rank.
inline constexpr char kOracleTable[] = "DDP_ORACLE_TABLE";      // path of scenarios.json
inline constexpr char kOracleModels[] = "DDP_ORACLE_MODELS";    // path of models.safetensors
inline constexpr char kOracleResults[] = "DDP_ORACLE_RESULTS";  // folder to write to

// The body of a rank. Runs every scenario of the table with our DistributedDataParallel. Writes
// this rank's values to tensors_RANK.safetensors and facts_RANK.json, under the names that
// README.md gives. The facts of a scenario that threw have its "error". Returns 0.
int RunOracleScenarios();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_
