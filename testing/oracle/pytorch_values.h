#ifndef DDP_TESTING_ORACLE_PYTORCH_VALUES_H_
#define DDP_TESTING_ORACLE_PYTORCH_VALUES_H_

#include <map>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace ddp::testing {

// Returns true when the values of PyTorch were made on this machine: tools/test --oracle.
bool HasFreshValues();

// Returns the table of runs in testing/oracle/NAME.
nlohmann::json ReadOracleTable(const std::string& name);

// Returns the floats of a file that PyTorch's side wrote, by the names of their tensors, widened to
// double. The file is of the fresh values where there are some, else of the committed ones. Empty
// when there is no such file.
std::map<std::string, std::vector<double>> ReadPyTorchValues(const std::string& name);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_PYTORCH_VALUES_H_
