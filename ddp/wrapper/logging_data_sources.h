// Functions that fill the fields of a DDPLoggingData.
#ifndef DDP_WRAPPER_LOGGING_DATA_SOURCES_H_
#define DDP_WRAPPER_LOGGING_DATA_SOURCES_H_

#include "base/environment.h"
#include "ddp/logging_data.h"

namespace ddp::internal {
class IterationTimer;
}  // namespace ddp::internal

namespace ddp::internal {

// Fills the fields of the environment. backend_name must be set before.
void FillEnvironment(DDPLoggingData& data, const VariableGetter& get);

// Fills the timings and overlap_ratio.
void FillTimes(DDPLoggingData& data, const IterationTimer& timer);

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_LOGGING_DATA_SOURCES_H_
