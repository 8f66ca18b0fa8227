// Where the fields of a DDPLoggingData come from.
#ifndef DDP_LOGGING_DATA_SOURCES_H_
#define DDP_LOGGING_DATA_SOURCES_H_

#include <functional>
#include <optional>
#include <string>

#include "ddp/logging_data.h"

namespace ddp::internal {
class IterationTimer;
}  // namespace ddp::internal

namespace ddp::internal {

// Returns nullopt for a variable that is unset.
using VariableGetter = std::function<std::optional<std::string>(const std::string& name)>;

// Fills the fields of the environment. Set backend_name before.
void FillEnvironment(DDPLoggingData& data, const VariableGetter& get);

// Fills the fields of times and overlap_ratio.
void FillTimes(DDPLoggingData& data, const IterationTimer& timer);

}  // namespace ddp::internal

#endif  // DDP_LOGGING_DATA_SOURCES_H_
