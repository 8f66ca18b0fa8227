#ifndef DDP_TESTING_FAKE_MODEL_VIEW_H_
#define DDP_TESTING_FAKE_MODEL_VIEW_H_

#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/model/model_view.h"

namespace ddp::testing {

// A model without a module: lists of tensors that the test fills and changes. Thread-compatible.
class FakeModelView final : public internal::ModelView {
 public:
  std::string name() const override { return "Fake"; }
  std::vector<internal::NamedTensor> parameters() const override { return named_parameters; }
  std::vector<internal::NamedTensor> buffers() const override { return named_buffers; }
  std::set<const c10::TensorImpl*> sparse_parameters() const override { return sparse; }
  bool is_training() const override { return true; }

  std::vector<internal::NamedTensor> named_parameters;
  std::vector<internal::NamedTensor> named_buffers;
  std::set<const c10::TensorImpl*> sparse;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FAKE_MODEL_VIEW_H_
