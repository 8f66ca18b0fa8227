#ifndef DDP_TESTING_ORACLE_ERROR_RUNNER_H_
#define DDP_TESTING_ORACLE_ERROR_RUNNER_H_

namespace ddp::testing {

// The body of a rank, of two: runs the cases of errors.py through ours and writes errors_RANK.json,
// the text of each case's error by its name, to the folder that kOracleResults (scenario_runner.h)
// names. Returns 0.
int RunOracleErrors();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_ERROR_RUNNER_H_
