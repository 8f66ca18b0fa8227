// What a wrapper's options and a model's tensors decide on one rank, without a collective. All
// errors are ConfigurationErrors.
#ifndef DDP_WRAPPER_MODEL_SETUP_H_
#define DDP_WRAPPER_MODEL_SETUP_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm_hook.h"
#include "ddp/model/model_metadata.h"
#include "ddp/options.h"
#include "ddp/reducer/reducer.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

struct ModelTensors;

// The name of the comm hook by which mixed_precision reduces.
inline constexpr char kMixedPrecisionHook[] = "mixed precision";

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

// Returns true when PlaceInput() changes inputs: device_ids are given, or mixed_precision casts.
bool PlacesInputs(const DistributedDataParallelOptions& options);

// Returns `input` on the device of device_ids and in the type of mixed_precision.
at::Tensor PlaceInput(const DistributedDataParallelOptions& options, const at::Tensor& input);

// Returns `output` on output_device, which must be set.
at::Tensor PlaceOutput(const DistributedDataParallelOptions& options, const at::Tensor& output);

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

// Throws unless `group` is the only state of the hook, so that update_process_group() can give the
// hook another group. An empty hook passes. `what` names the hook.
void CheckFollows(const CommHook& hook, const std::string& what,
                  const std::shared_ptr<ProcessGroup>& group);
void CheckFollows(const BufferCommHook& hook, const std::string& what,
                  const std::shared_ptr<ProcessGroup>& group);

// Returns what must be equal on all ranks: the options and the tensors.
ModelMetadata MetadataOf(const DistributedDataParallelOptions& options,
                         const ModelTensors& tensors);

// Does the same for hooks. `name`: of the comm hook; "" without one. `buffer_hook`: see
// BufferSync::HookText().
ModelMetadata HookMetadataOf(const std::string& name, int rounds, const std::string& buffer_hook);

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_MODEL_SETUP_H_
