// Data-parallel training in C++. A trainer includes this one header:
//
//   #include <torch/torch.h>
//   #include "ddp/ddp.h"
//
//   int Train() {
//     auto group = ddp::init_process_group();          // meets the other ranks
//     auto net = std::make_shared<Net>();
//     ddp::DistributedDataParallel model(net, group);  // rank 0's weights everywhere
//     torch::optim::SGD optimizer(net->parameters(), 0.1);
//     ...
//     loss.backward();                                 // averages the gradients over the ranks
//     optimizer.step();
//     return 0;
//   }
//
//   int main() { return ddp::elastic::run_worker(Train); }  // elastic/worker/error_file.h
//
// and is started by `ddprun --nproc-per-node=2 ./trainer`.
//
// Where to read on: process_group.h (who the ranks are and how they meet),
// distributed_data_parallel.h (the wrapper and its rules), data_parallel_core.h (its options),
// error.h (what is thrown).
#ifndef DDP_DDP_H_
#define DDP_DDP_H_

#include "base/language.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/error.h"
#include "ddp/process_group.h"

#endif  // DDP_DDP_H_
