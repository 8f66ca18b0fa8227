// What a person or a monitor wants to know of a model's buckets.
#ifndef DDP_MODEL_REPORT_H_
#define DDP_MODEL_REPORT_H_

#include <string>

#include "ddp/logging_data.h"

namespace ddp::internal {

class Reducer;

// A table with a line for each bucket, in the order of reduction:
//   4 parameters, 0.9 KiB of gradients in 2 buckets (as first dealt)
//   bucket  parameters        KiB  type   names
//        0           2        0.2  float  last.bias, last.weight
std::string BucketTable(const Reducer& reducer);

// The buckets' sizes in bytes, "1024, 512".
std::string BucketSizes(const Reducer& reducer);

// Fills the fields of `data` that the reducer knows, except the sizes of its first buckets.
void DescribeParameters(const Reducer& reducer, DDPLoggingData& data);

// Hands `data` to the function that the program gave to c10::SetPyTorchDDPUsageLogger, if any.
void ReportUsage(const DDPLoggingData& data);

}  // namespace ddp::internal

#endif  // DDP_MODEL_REPORT_H_
