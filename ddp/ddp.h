// Data-parallel training in C++. A trainer includes this one header:
//
//   #include <torch/torch.h>
//   #include "ddp/ddp.h"
//
//   int Train() {
//     auto group = ddp::init_process_group();          // meets the other ranks
//     Net net;                                         // a torch::nn::Module's holder
//     ddp::DistributedDataParallel model(net, group);  // rank 0's weights everywhere
//     torch::optim::SGD optimizer(model->parameters(), 0.1);
//     ...
//     auto loss = (model->forward(inputs) - targets).pow(2).mean();
//     loss.backward();                                 // averages the gradients over the ranks
//     optimizer.step();
//     return 0;
//   }
//
//   int main() { return ddp::elastic::run_worker(Train); }  // elastic/worker/error_file.h
//
// and is started by `ddprun --nproc-per-node=2 ./trainer`.
//
// Where to read on:
//   process_group.h              who the ranks are, how they meet, and their collectives;
//                                reduce_op.h: sums and the like; work.h: a collective under way;
//                                device_mesh.h: ranks in a grid
//   distributed_data_parallel.h  the wrapper and its rules
//   options.h                    its options, PyTorch's; mixed_precision.h for one of them;
//                                option.h: two styles of setting them
//   join.h                       ranks with different numbers of inputs
//   comm_hook.h                  how gradients travel; default_hooks.h: those that there are
//   activation_checkpoint.h      memory for time
//   tensor_traversal.h           which types a module may return; aggregate_fields.h: plain structs
//   logging_data.h               what a model tells of itself
//   error.h                      what is thrown
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
#include "ddp/option.h"
#include "ddp/options.h"
#include "ddp/process_group.h"
#include "ddp/reduce_op.h"
#include "ddp/tensor_traversal.h"
#include "ddp/work.h"

#endif  // DDP_DDP_H_
