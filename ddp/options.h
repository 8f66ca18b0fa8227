#ifndef DDP_OPTIONS_H_
#define DDP_OPTIONS_H_

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/device_mesh.h"
#include "ddp/mixed_precision.h"
#include "ddp/option.h"

namespace ddp {

class ProcessGroup;

// Names, defaults and effects are those of PyTorch's DistributedDataParallel, except where a field
// says otherwise. All ranks give equal options; the constructor compares them.
//
//   DistributedDataParallel model(net, group, {.bucket_cap_mb = 25, .static_graph = true});
//   auto options = DistributedDataParallelOptions().bucket_cap_mb(25).static_graph(true);
//
// The other option structs of ddp/ take both styles too; see option.h.
struct DistributedDataParallelOptions {
  using Self = DistributedDataParallelOptions;

  // ---- Where ----

  // The ranks to average over. Given here or as the constructor's own argument, or by the mesh.
  DDP_OPTION(process_group, std::shared_ptr<ProcessGroup>) = {};

  // A one-dimensional mesh in place of a process group.
  DDP_OPTION(device_mesh, std::optional<DeviceMesh>) = {};

  // The one GPU that holds the module; inputs are then moved there before every forward. Empty:
  // inputs are taken as they come. A module on several GPUs is an error either way: one process
  // trains on one GPU. Ranks may name different GPUs; either all name one or none does.
  DDP_OPTION(device_ids, std::vector<int>) = {};

  // The GPU to which device_ids' outputs go; unset: they stay where they are.
  DDP_OPTION(output_device, std::optional<int>) = {};

  // ---- State that starts and stays equal ----

  // The constructor copies rank 0's parameters and buffers to all ranks. Without it they must be
  // equal already, from a checkpoint for example; nothing checks that they are.
  DDP_OPTION(init_sync, bool) = true;

  // Every synchronized forward begins with rank 0's buffers (running statistics of batch norms) on
  // all ranks, whether the module is in train() or in eval(): ranks may differ in that. A forward
  // without gradients (torch::NoGradGuard) or under no_sync() copies nothing, so one rank may
  // evaluate alone. Buffers change in place, and views of them follow. false: never, neither here
  // nor in the constructor.
  DDP_OPTION(broadcast_buffers, bool) = true;

  // Overrides broadcast_buffers for the forwards alone: with false the constructor still copies the
  // buffers once.
  DDP_OPTION(forward_sync_buffers, std::optional<bool>) = {};

  // Names of parameters and buffers that this wrapper leaves alone altogether, in copying and in
  // reducing ("layer.weight"). A name that the module does not have is an error.
  DDP_OPTION(params_and_buffers_to_ignore, std::set<std::string>) = {};

  // ---- Buckets ----

  // Size in MiB at which a gradient bucket is closed and reduced. Larger: fewer, longer messages;
  // smaller: more overlap with the backward. Unset: 25.
  DDP_OPTION(bucket_cap_mb, std::optional<double>) = {};

  // The same for the bucket that is ready first, so that communication starts early. Unset: 1, or
  // bucket_cap_mb where that is set.
  DDP_OPTION(first_bucket_cap_mb, std::optional<double>) = {};

  // A limit in MiB for each bucket in turn, the last one serving all further ones. Not together
  // with the other two.
  DDP_OPTION(bucket_cap_mb_list, std::vector<double>) = {};

  // The buckets of an earlier run, by parameter names, as bucket_layout() gave them and a
  // checkpoint kept them. They are used from the first backward on and not dealt anew. Sums over
  // more than two ranks depend on the buckets to the bit, so a run that is to continue another bit
  // by bit needs its layout. (Not in PyTorch.)
  DDP_OPTION(bucket_layout, std::vector<std::vector<std::string>>) = {};

  // Lets gradients be parts of the buckets instead of copies: saves one gradient's memory and a
  // copy per step. Then gradients must not be detached in place or replaced by other tensors;
  // zero_grad() is fine in both its forms.
  DDP_OPTION(gradient_as_bucket_view, bool) = false;

  // Copies the gradients of a bucket together once all are there, in one operation, instead of one
  // by one. For GPUs; gradients in float or double on the CPU are copied by a faster way anyway.
  DDP_OPTION(batched_grad_copy, bool) = false;

  // Allocates a bucket when its first gradient comes and frees it at the end of the backward: less
  // memory during the forward. Not together with gradient_as_bucket_view.
  DDP_OPTION(lazy_bucket_allocation, bool) = false;

  // ---- Which gradients come ----

  // Some parameters may get no gradient in some iterations, on some ranks or on all: a layer that a
  // forward does not use, or an output that the loss leaves out. Every backward is a reduction of
  // its own. Parameters that it does not reach count as ready, with zeros, and a parameter that no
  // rank used keeps its gradient as it is (undefined stays undefined).
  DDP_OPTION(find_unused_parameters, bool) = false;

  // The graph is the same in every iteration: the first synchronized one learns which parameters
  // get a gradient and how often, without a search ever. Allows what breaks the count otherwise:
  // re-entrant checkpoints of a segment that is used twice, and unused parameters.
  DDP_OPTION(static_graph, bool) = false;

  // Buckets in which no rank used any parameter are not sent. Needs find_unused_parameters or
  // static_graph. The ranks agree on the unused ones before the buckets start, so that unlike in
  // PyTorch they may differ between ranks and iterations.
  DDP_OPTION(skip_all_reduce_unused_params, bool) = false;

  // Parameters, by name, that are left out of the buckets. Their gradients are parts of one tensor,
  // which is averaged when `param_to_hook_all_reduce` gets its gradient, or after the buckets where
  // ranks may differ in what they use; they are averages when the backward returns. The next
  // forward makes them zero: step the optimizer before it.
  DDP_OPTION(delay_all_reduce_named_params, std::vector<std::pair<std::string, at::Tensor>>) = {};
  DDP_OPTION(param_to_hook_all_reduce, at::Tensor) = {};

  // Forward and backward in lower precision; see mixed_precision.h. Unset: as the module is.
  DDP_OPTION(mixed_precision, std::optional<MixedPrecision>) = {};
};

}  // namespace ddp

#endif  // DDP_OPTIONS_H_
