#ifndef DDP_REDUCER_PLAN_AGREEMENT_H_
#define DDP_REDUCER_PLAN_AGREEMENT_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "ddp/reducer/buckets/bucket_plan.h"

namespace ddp::internal {

class ModelGroup;

// Returns the properties of parameters that a plan depends on. Parameters of one type and device
// get the same `kind`. `sparse` says which parameters have sparse gradients.
std::vector<BucketPlan::Tensor> DescribeTensors(const std::vector<at::Tensor>& parameters,
                                                const std::vector<bool>& sparse);

// Returns the plan. Throws ConfigurationError with the status' message when there is none.
BucketPlan PlanOrThrow(absl::StatusOr<BucketPlan> plan);

// The functions below are the collectives by which the ranks of a group agree on their bucket
// plans. Each blocks until all ranks have called it, and throws as Communicator::Wait().

// What a rank tells the others in its first pass after a failure.
struct PassRecord {
  bool rebuilt = false;
  bool rebuild_requested = false;
  int64_t passes = 0;  // that were complete

  // Why the parameters of the ranks may differ; the most serious reason is the greatest.
  enum class Doubt : uint8_t {
    kNone,
    kTold,      // the ranks were told of one of the others
    kUnproven,  // the last pass was enqueued, and then aborted
  };
  Doubt doubt = Doubt::kNone;
};

// The result of ComparePlans(), which is the same on all ranks.
struct PlanComparison {
  bool equal = false;              // all ranks have the same plan, and the same `rebuilt`
  bool rebuild_requested = false;  // on some rank
  bool equal_passes = false;
  PassRecord::Doubt doubt = PassRecord::Doubt::kNone;  // the greatest
};

// Compares the plans and records of all ranks.
PlanComparison ComparePlans(const BucketPlan& plan, const PassRecord& record, ModelGroup& group);

// Returns the plan of the rank `source`. `plan` is looked at on that rank only. `tensors` describe
// the parameters. Throws ConfigurationError when the received integers are no plan for them.
BucketPlan BroadcastPlan(const BucketPlan& plan, const std::vector<BucketPlan::Tensor>& tensors,
                         int source, ModelGroup& group);

}  // namespace ddp::internal

#endif  // DDP_REDUCER_PLAN_AGREEMENT_H_
