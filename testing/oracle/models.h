#ifndef DDP_TESTING_ORACLE_MODELS_H_
#define DDP_TESTING_ORACLE_MODELS_H_

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace ddp::testing {

// One of the oracle's models: the same layers, names and order of registration as in models.py,
// which says what each of them is for.
class OracleModel : public torch::nn::Module {
 public:
  // What a batch gives on `rank` at `step`.
  virtual at::Tensor forward(const at::Tensor& x, int rank, int step) = 0;
  virtual at::Tensor Loss(const at::Tensor& outputs, const at::Tensor& y) const = 0;
};

// By its name in the table of scenarios; null when there is none.
std::shared_ptr<OracleModel> MakeOracleModel(const std::string& name);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_MODELS_H_
