#ifndef DDP_TESTING_ORACLE_ERROR_RUNNER_H_
#define DDP_TESTING_ORACLE_ERROR_RUNNER_H_

namespace ddp::testing {

// The body of each of two ranks. Runs the cases of errors.py with our library, and writes
// errors_RANK.json: the error text of each case by its name. The folder is the one that
// kOracleResults (scenario_runner.h) names. Returns 0.
int RunOracleErrors();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_ERROR_RUNNER_H_
