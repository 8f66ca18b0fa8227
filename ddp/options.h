#ifndef DDP_OPTIONS_H_
#define DDP_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/device_mesh.h"
#include "ddp/mixed_precision.h"

namespace ddp {

class ProcessGroup;

// Options of a DistributedDataParallel. Names, defaults and effects are those of PyTorch's
// DistributedDataParallel, except where a field says otherwise. All ranks must give equal options,
// but may name different GPUs; the constructor compares them.
//
//   DistributedDataParallel model(net, group, {.bucket_cap_mb = 25, .static_graph = true});
//
// A plain struct: a program names fields in the order below, or assigns them one by one. So are the
// other option structs of ddp/.
struct DistributedDataParallelOptions {
  // ---- Ranks and devices ----

  // The group over whose ranks gradients are averaged. Set it here, or pass it to the constructor,
  // or set device_mesh.
  std::shared_ptr<ProcessGroup> process_group = {};

  // A one-dimensional mesh instead of a process group.
  std::optional<DeviceMesh> device_mesh = {};

  // The one GPU that holds the module. Every forward first moves its inputs there. Empty: inputs
  // are not moved. A module on several GPUs is always an error: one process trains on one GPU.
  // Ranks may name different GPUs; either all ranks name one or none does.
  std::vector<int> device_ids = {};

  // The GPU to which outputs are moved; needs device_ids. Unset: outputs are not moved.
  std::optional<int> output_device = {};

  // ---- Parameters and buffers ----

  // When true, the constructor copies rank 0's parameters and buffers to all ranks. With false they
  // must be equal already, for example from a checkpoint; nothing checks that they are.
  bool init_sync = true;

  // Above 0: compares the parameters of all ranks, bit by bit, in the first synchronized forward
  // and in every `check_parameters_every`-th one after it. When they differ, this forward throws
  // ReductionError on all ranks; the text names the first parameter that differs and the ranks.
  // Finds replicas that have drifted apart for reasons of the program: an optimizer that steps with
  // a local value (the loss in the closure of LBFGS), a step on some ranks only, a random number.
  // A failure, update_process_group() and the end of a Join make the next forward the first one
  // again. A forward under a Join is not compared. Each comparison reads all parameters once on the
  // host (XXH3) and sends 32 bytes. 0: never. (Not in PyTorch.)
  int64_t check_parameters_every = 0;

  // When true, every synchronized forward first copies rank 0's buffers (such as running statistics
  // of batch norms) to all ranks. The copy does not depend on train() or eval(), so ranks may
  // differ in that. A forward under torch::NoGradGuard or no_sync() copies nothing, so one rank may
  // evaluate alone. Buffers change in place, and views of them follow. With false, the constructor
  // does not copy buffers either.
  bool broadcast_buffers = true;

  // Overrides broadcast_buffers for forwards only: with false, the constructor still copies the
  // buffers once.
  std::optional<bool> forward_sync_buffers = {};

  // Names of parameters and buffers ("layer.weight") that the wrapper neither copies nor reduces. A
  // name that the module does not have is an error.
  std::set<std::string> params_and_buffers_to_ignore = {};

  // ---- Buckets ----

  // Size in MiB at which a gradient bucket is closed and reduced. Larger buckets: fewer, longer
  // messages. Smaller buckets: more overlap with the backward. Unset: 25.
  std::optional<double> bucket_cap_mb = {};

  // Size in MiB of the bucket that is filled first. Rebuilt buckets are filled in the order of the
  // gradients, so this bucket is ready first; small, so that communication starts early. Buckets
  // that are not rebuilt yet are filled in the order of registration, so this bucket is ready last.
  // Unset: 1, or bucket_cap_mb where that is set.
  std::optional<double> first_bucket_cap_mb = {};

  // One limit in MiB for each bucket in the order of filling; the last limit holds for all further
  // buckets. Not together with bucket_cap_mb or first_bucket_cap_mb.
  std::vector<double> bucket_cap_mb_list = {};

  // The buckets of an earlier run, as parameter names: a value of bucket_layout() that a checkpoint
  // saved. They are used from the first backward on, and rebuilt only after rebuild_buckets(). Over
  // more than two ranks, the exact bits of a sum depend on the buckets. A run that must continue
  // another one bit by bit needs its layout. (Not in PyTorch.)
  std::vector<std::vector<std::string>> bucket_layout = {};

  // When true, gradients are views of the buckets instead of copies. Saves the memory of a second
  // copy of all gradients, and one copy per step. Gradients must then not be detached in place or
  // replaced by other tensors. Both forms of zero_grad() are allowed.
  bool gradient_as_bucket_view = false;

  // When true, the gradients of a bucket are copied in one operation when all are ready, instead of
  // one by one. On a GPU they always are. On the CPU, gradients in float or double take a faster
  // path anyway.
  bool batched_grad_copy = false;

  // When true, a bucket is allocated at its first gradient and freed at the end of the backward.
  // Saves memory during the forward. Not together with gradient_as_bucket_view.
  bool lazy_bucket_allocation = false;

  // When true, and all ranks share a host (the backend is "shm"), gradients are averaged where they
  // lie: in memory that LibTorch's allocator serves from an arena that all ranks of the host see.
  // There is no flat tensor and no copy. Other ranks change a gradient from its hook on until the
  // end of the backward. The first such model installs an allocator of this library for the
  // process, which serves from the arena during backwards only. Where it is not possible (comm
  // hooks, gradient_as_bucket_view, lazy_bucket_allocation, mixed_precision, types other than float
  // and double), buckets are flat, whatever this says. (Not in PyTorch.)
  bool reduce_in_place = true;

  // The most memory in bytes that the arena holds for this model. Gradients beyond it are summed by
  // an all-reduce of their own. Unset: twice the model's gradients; more is never used than the
  // gradients, and tensors of their sizes in the backward, need at once. (Not in PyTorch.)
  std::optional<int64_t> arena_bytes = {};

  // ---- Unused parameters and changing graphs ----

  // When true, some parameters may get no gradient in some iterations, on some ranks or on all: the
  // forward does not use a layer, or the loss leaves out an output. Every backward is then a
  // reduction of its own. A parameter that the backward does not reach contributes zeros. A
  // parameter that no rank used keeps its gradient (undefined stays undefined).
  bool find_unused_parameters = false;

  // When true, the program promises that the graph is the same in every iteration. The first
  // synchronized backward then records which parameters get a gradient and how often; no backward
  // searches the graph. Supports unused parameters, and re-entrant checkpoints of a segment that is
  // used twice.
  bool static_graph = false;

  // When true, buckets in which no rank used any parameter are not sent. Needs
  // find_unused_parameters or static_graph. The ranks agree on the unused parameters before the
  // buckets start, so these may differ between ranks and iterations. (In PyTorch they may not.)
  bool skip_all_reduce_unused_params = false;

  // Parameters, by name, whose gradients are not in the buckets but in one separate tensor. That
  // tensor is averaged when `param_to_hook_all_reduce` gets its gradient. Where ranks may use
  // different parameters, it is averaged after the buckets. The averages are complete when the
  // backward returns. The next forward outside of NoGradGuard sets these gradients to zero: step
  // the optimizer before it.
  //
  // Choose a `param_to_hook_all_reduce` whose gradient comes after the gradients of all these
  // parameters, on every rank: a parameter of the layer that the forward uses first. A gradient of
  // these parameters that comes later throws ReductionError.
  std::vector<std::pair<std::string, at::Tensor>> delay_all_reduce_named_params = {};
  at::Tensor param_to_hook_all_reduce = {};

  // When true, a synchronized backward returns without waiting for the sums of the gradients, and
  // finalize_backward() waits for them. The program can do other work in between, such as the
  // communication of another model. Until then the gradients are of no use: this rank's own, sums
  // of some ranks, or undefined. A forward with gradients before finalize_backward() throws
  // ReductionError, on this rank alone; a second one fails the reduction on all ranks. Under a
  // Join, call finalize_backward() before another model of the Join communicates. Not together with
  // delay_all_reduce_named_params. PyTorch has this as a property of the wrapper.
  bool require_manual_backward_finalization = false;

  // Lower precision in forward and backward; see mixed_precision.h. Unset: the module's own
  // precision.
  std::optional<MixedPrecision> mixed_precision = {};
};

}  // namespace ddp

#endif  // DDP_OPTIONS_H_
