#ifndef DDP_NN_CONVERT_SYNC_BATCHNORM_H_
#define DDP_NN_CONVERT_SYNC_BATCHNORM_H_

#include <memory>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp {

class ProcessGroup;

// Makes every torch::nn::BatchNorm1d, 2d and 3d of `module` and its submodules a SyncBatchNorm, in
// place: the same object, with its name, parameters and buffers, takes its statistics over all
// ranks in training. Returns the number of BatchNorms. Other modules, InstanceNorm among them, stay
// as they are, and so does a ddp::SyncBatchNorm2d.
//
//   Net net;                                  // with members torch::nn::BatchNorm2d
//   ddp::convert_sync_batchnorm(*net);        // before the DistributedDataParallel
//   ddp::DistributedDataParallel model(net, group);
//
// `group` has the meaning that it has in the constructor of SyncBatchNorm2d. The layers do not own
// the group; a DistributedDataParallel that is constructed later does. Without such a wrapper, the
// caller must keep the group: a forward in training throws ConfigurationError when the group has
// been destroyed.
//
// A second call changes only the groups. Call it before the DistributedDataParallel is constructed:
// a forward of a model with a group that came later throws ConfigurationError.
//
// The first call registers a function for LibTorch's operator aten::batch_norm, for the whole
// process. The function recognizes a converted layer by its running mean or its weight, and leaves
// every other call to LibTorch. So:
// - A layer with neither throws ConfigurationError, which names the layer; then no layer changes.
//   Use a ddp::SyncBatchNorm2d there.
// - A clone of the module, or a layer after reset(), is not converted: call this function again.
// - LibTorch counts a batch before the function sees it, so an empty joint batch counts too.
// - LibTorch refuses a batch of this rank with one value in each channel before the function sees
//   it. A ddp::SyncBatchNorm2d takes it.
//
// Throws ConfigurationError also when `module` is itself a BatchNorm that no std::shared_ptr holds.
// Not a collective; call it on all ranks.
int convert_sync_batchnorm(torch::nn::Module& module,
                           std::shared_ptr<ProcessGroup> group = nullptr);

// Returns true when `module` or a submodule is a SyncBatchNorm or a converted BatchNorm.
bool has_sync_batch_norm(const torch::nn::Module& module);

}  // namespace ddp

#endif  // DDP_NN_CONVERT_SYNC_BATCHNORM_H_
