#ifndef DDP_TRAIN_OPTIM_MOMENTUM_OPTIONS_H_
#define DDP_TRAIN_OPTIM_MOMENTUM_OPTIONS_H_

namespace ddp::train {

// What the options of an optimizer implement so that OneCycleLR and CyclicLR can change its
// momentum. The options of LibTorch's optimizers need not: the schedulers know them.
class MomentumOptions {
 public:
  // Returns the momentum, or the first of two betas. The options own the number.
  virtual double& momentum_or_beta1() = 0;

 protected:
  ~MomentumOptions() = default;
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_OPTIM_MOMENTUM_OPTIONS_H_
