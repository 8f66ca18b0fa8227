// The table of options: one row for each field of DistributedDataParallelOptions.
//
// The comparison of the ranks and the options in DDPLoggingData come from the rows. A new option is
// a field of ddp/options.h and a row in option_table.cc; without the row, option_table.cc does not
// compile. docs/parity.md has a line for each row. model_setup.h has the rest: CheckOptions()
// refuses options that contradict each other, and ReducerOptionsOf() passes options on to the
// reducer.
#ifndef DDP_WRAPPER_OPTION_TABLE_H_
#define DDP_WRAPPER_OPTION_TABLE_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ddp/logging_data.h"

namespace ddp {
struct DistributedDataParallelOptions;
}  // namespace ddp

namespace ddp::internal {

class ModelMetadata;

// One option.
struct OptionRow {
  // The names and the values, as text, that must be equal on all ranks.
  using Items = std::vector<std::pair<std::string, std::string>>;

  const char* name;  // the field's name; PyTorch's, where PyTorch has the option
  // Null: the ranks compare nothing, or another row compares the value.
  Items (*items)(const std::string& name, const DistributedDataParallelOptions& options) = nullptr;
  // Sets the field of the logging data that shows the option. Null: there is none.
  void (*log)(const DistributedDataParallelOptions& options, DDPLoggingData& data) = nullptr;
};

// Returns the rows, in the order in which the ranks compare them.
std::span<const OptionRow> OptionTable();

// Returns the limits of the buckets in bytes, which three options give together; see
// BucketLimits(). Throws ConfigurationError for a size that BucketLimits() refuses.
std::vector<int64_t> BucketLimitsOf(const DistributedDataParallelOptions& options);

// Adds all items. Throws as BucketLimitsOf() does.
void AddOptions(const DistributedDataParallelOptions& options, ModelMetadata& metadata);

// Fills the fields of `data` that show options. Throws as BucketLimitsOf() does.
void FillOptions(const DistributedDataParallelOptions& options, DDPLoggingData& data);

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_OPTION_TABLE_H_
