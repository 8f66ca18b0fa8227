// Texts about a model and its training, for people and monitors.
#ifndef DDP_WRAPPER_MODEL_REPORT_H_
#define DDP_WRAPPER_MODEL_REPORT_H_

#include <cstdint>
#include <string>

#include "ddp/logging_data.h"

namespace ddp::internal {

class Reducer;

// Returns a table with a line for each bucket, in the order of reduction:
//   4 parameters, 0.9 KiB of gradients in 2 buckets (as first dealt)
//   bucket  parameters        KiB  type   names
//        0           2        0.2  float  last.bias, last.weight
std::string BucketTable(const Reducer& reducer);

// Returns the buckets' sizes in bytes, "1024, 512".
std::string BucketSizes(const Reducer& reducer);

// Fills the fields of `data` that the reducer knows, except bucket_sizes.
void DescribeParameters(const Reducer& reducer, DDPLoggingData& data);

// Returns true when ReportUsage() is due: after 10, 20, 50, 100, 500, 800 and 1000 timed
// iterations, as in PyTorch.
bool IsUsageDue(int64_t timed_iterations);

// Passes `data` to the function that the program registered with c10::SetPyTorchDDPUsageLogger(),
// if any.
void ReportUsage(const DDPLoggingData& data);

// Returns the message for a forward without tensors in its result, where find_unused_parameters
// needs them. `complete`: the result can hold no tensors that the wrapper did not find.
std::string NoOutputsMessage(int rank, bool complete);

// Returns the warning of a backward that reached `parameter` without a forward of the wrapper.
std::string BareBackwardMessage(int rank, const std::string& parameter);

// Returns the warning of a backward that left out `parameter` and reached a tensor of its shape,
// which `leaf` describes.
std::string StrangerMessage(int rank, const std::string& parameter, const std::string& leaf);

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_MODEL_REPORT_H_
