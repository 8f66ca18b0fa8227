#ifndef DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_
#define DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_

namespace ddp::testing {

// Names of the environment variables that the test sets for a rank.
inline constexpr char kOracleTable[] = "DDP_ORACLE_TABLE";      // path of scenarios.json
inline constexpr char kOracleModels[] = "DDP_ORACLE_MODELS";    // path of models.safetensors
inline constexpr char kOracleBackend[] = "DDP_ORACLE_BACKEND";  // ProcessGroupOptions::backend
inline constexpr char kOracleResults[] = "DDP_ORACLE_RESULTS";  // folder to write to

// The body of a rank. Runs every scenario of the table with our DistributedDataParallel. Writes
// this rank's values to tensors_RANK.safetensors and facts_RANK.json, under the names that
// README.md gives. The facts of a scenario that threw have its "error". Returns 0.
int RunOracleScenarios();

// The body of each of three ranks. Runs the program of rpc_run.py with our remote calls: ranks 0
// and 1 train, rank 2 has the table. A trainer writes its values to rpc_RANK.safetensors. Returns
// 0.
int RunOracleRpc();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_SCENARIO_RUNNER_H_
