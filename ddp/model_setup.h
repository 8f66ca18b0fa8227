// What a wrapper's options and a model's tensors decide on one rank, without a collective. All
// errors are ConfigurationErrors.
#ifndef DDP_MODEL_SETUP_H_
#define DDP_MODEL_SETUP_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/model/model_metadata.h"
#include "ddp/options.h"
#include "ddp/reducer/reducer.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

struct ModelTensors;

// Returns `options` with the group `group`. Throws when they name another group.
DistributedDataParallelOptions WithGroup(DistributedDataParallelOptions options,
                                         std::shared_ptr<ProcessGroup> group);

// Returns the group of the options, their own or that of their mesh; null: neither is set. Throws
// when both are set, or the mesh has more than one dimension.
std::shared_ptr<ProcessGroup> GroupOf(const DistributedDataParallelOptions& options);

// Throws when options contradict each other; warns of those that change nothing.
void CheckOptions(const DistributedDataParallelOptions& options);

// Throws unless the model has a trainable parameter, and its tensors are on devices that the group
// and device_ids allow.
void CheckPlacement(const DistributedDataParallelOptions& options, const ModelTensors& tensors,
                    const ProcessGroup& group);

// Returns the trainable parameters that the reducer handles: all but the delayed ones. Throws when
// a delayed one is not among the trainable parameters.
std::vector<Reducer::Parameter> ReducedParameters(const DistributedDataParallelOptions& options,
                                                  const ModelTensors& tensors);

// Returns the plan with the buckets of `layout`, which holds names of `parameters`; nullopt: the
// layout is empty. Throws when it does not fit the parameters.
std::optional<BucketPlan> GivenPlan(const std::vector<std::vector<std::string>>& layout,
                                    const std::vector<Reducer::Parameter>& parameters);

Reducer::Options ReducerOptionsOf(const DistributedDataParallelOptions& options,
                                  const std::vector<Reducer::Parameter>& reduced);

// Returns what must be equal on all ranks: the options and the tensors.
ModelMetadata MetadataOf(const DistributedDataParallelOptions& options,
                         const ModelTensors& tensors);

// Does the same for hooks. `name`: of the comm hook; "" without one. `buffer_hook`: see
// BufferSync::HookText().
ModelMetadata HookMetadataOf(const std::string& name, int rounds, const std::string& buffer_hook);

}  // namespace ddp::internal

#endif  // DDP_MODEL_SETUP_H_
