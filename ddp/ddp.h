// Data-parallel training in C++. A trainer includes this one header:
//
//   #include <torch/torch.h>
//   #include "ddp/ddp.h"
//
//   int Train() {
//     auto group = ddp::init_process_group();          // connects to the other ranks
//     Net net;                                         // a torch::nn::Module's holder
//     ddp::DistributedDataParallel model(net, group);  // copies rank 0's weights to all ranks
//     torch::optim::SGD optimizer(model->parameters(), 0.1);
//     ...
//     auto loss = (model->forward(inputs) - targets).pow(2).mean();
//     loss.backward();                                 // averages the gradients over the ranks
//     optimizer.step();
//     return 0;
//   }
//
//   int main() { return ddp::elastic::run_worker(Train); }  // elastic/worker/run_worker.h
//
// and is started by `ddprun --nproc-per-node=2 ./trainer`.
//
// Where to read on:
//   process_group.h              the ranks, how they connect, and their collectives
//   register_backend.h           a name for a backend of the program's own
//   work.h                       a collective that has started and not completed
//   reduce_op.h                  sum, minimum and the other reductions
//   device_mesh.h                ranks in a grid
//   distributed_data_parallel.h  the wrapper and its rules
//   torch_script.h               the wrapper of a TorchScript module
//   options.h                    the wrapper's options; mixed_precision.h: one of them
//   join.h                       ranks with different numbers of inputs
//   comm_hook.h                  custom gradient communication; default_hooks.h: built-in hooks
//   activation_checkpoint.h      less memory for more computation
//   tensor_traversal.h           types that a module may return; aggregate_fields.h: plain structs
//   logging_data.h               properties and timings of a model
//   error.h                      exceptions
// docs/bazel.md lists the public headers of other rooms. Every other header of ddp/ is internal.
#ifndef DDP_DDP_H_
#define DDP_DDP_H_

#include "base/language.h"
#include "ddp/activation_checkpoint.h"
#include "ddp/aggregate_fields.h"
#include "ddp/comm_hook.h"
#include "ddp/default_hooks.h"
#include "ddp/device_mesh.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "ddp/join.h"
#include "ddp/logging_data.h"
#include "ddp/mixed_precision.h"
#include "ddp/options.h"
#include "ddp/process_group.h"
#include "ddp/reduce_op.h"
#include "ddp/register_backend.h"
#include "ddp/tensor_traversal.h"
#include "ddp/torch_script.h"
#include "ddp/work.h"

#endif  // DDP_DDP_H_
