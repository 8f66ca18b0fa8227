// The table of options: one row for each field of DistributedDataParallelOptions.
//
// The comparison of the ranks, the options in DDPLoggingData and its JSON, and the table in
// docs/parity.md come from the rows. A new option is a field of ddp/options.h and a row in
// option_table.cc; without the row, option_table.cc does not compile. model_setup.h has the rest:
// CheckOptions() refuses options that contradict each other, and ReducerOptionsOf() passes options
// on to the reducer.
#ifndef DDP_OPTION_TABLE_H_
#define DDP_OPTION_TABLE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ddp/logging_data.h"

namespace ddp {
struct DistributedDataParallelOptions;
}  // namespace ddp

namespace ddp::internal {

class ModelMetadata;

// A field of DDPLoggingData that shows an option.
template <typename T>
struct LoggedOption {
  const char* key;  // the field's name, and its key in JSON
  T DDPLoggingData::*field;
  T (*value)(const DistributedDataParallelOptions& options);
};

// One option. Constant.
struct OptionRow {
  // The name and the value, as text, of something that must be equal on all ranks.
  using Item = std::pair<std::string, std::string>;

  const char* name;                // the field's name; PyTorch's, where PyTorch has the option
  std::string (*default_value)();  // as text for people: "true", "unset", "empty"

  // The items that the ranks compare. Null: this row adds none.
  std::vector<Item> (*items)(const std::string& name,
                             const DistributedDataParallelOptions& options) = nullptr;

  // The items that all ranks must share, for people. Empty: none. A row without items may have a
  // text, when another row's items contain its value.
  std::string_view agreement = "";

  std::variant<std::monostate, LoggedOption<bool>, LoggedOption<int64_t>, LoggedOption<std::string>>
      logged = {};

  std::string_view effect;  // one sentence, in Markdown
};

// Returns the rows, in the order in which the ranks compare them.
std::span<const OptionRow> OptionTable();

// Returns the limits of the buckets in bytes, which three options give together; see
// BucketLimits(). Throws ConfigurationError for a size that BucketLimits() refuses.
std::vector<int64_t> BucketLimitsOf(const DistributedDataParallelOptions& options);

// Returns true when bucket_cap_mb is kAuto. The limits above are then those before the choice.
bool HasAutoCap(const DistributedDataParallelOptions& options);

// Adds all items. Throws as BucketLimitsOf() does.
void AddOptions(const DistributedDataParallelOptions& options, ModelMetadata& metadata);

// Calls f(logged) with the LoggedOption of each row that has one.
template <typename F>
void ForEachLoggedOption(F&& f) {
  for (const OptionRow& row : OptionTable()) {
    std::visit(
        [&f](const auto& logged) {
          if constexpr (!std::is_same_v<decltype(logged), const std::monostate&>) f(logged);
        },
        row.logged);
  }
}

// Fills the fields of `data` that show options. Throws as BucketLimitsOf() does.
void FillOptions(const DistributedDataParallelOptions& options, DDPLoggingData& data);

}  // namespace ddp::internal

#endif  // DDP_OPTION_TABLE_H_
