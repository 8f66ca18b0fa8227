// Runs a Case on one rank of a backend, within memory that is checked for stray writes.
#ifndef DDP_COMM_CONFORMANCE_CASE_RUN_H_
#define DDP_COMM_CONFORMANCE_CASE_RUN_H_

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "ddp/comm/conformance/collective_case.h"
#include "ddp/comm/conformance/test_backends.h"
#include "ddp/comm/conformance/test_group.h"

namespace ddp::internal {

// A tensor of one dimension within a larger buffer, whose other bytes must not change.
class GuardedTensor {
 public:
  // `before` elements of the buffer lie before the tensor: the tensor's alignment depends on it.
  GuardedTensor(const at::Tensor& values, int64_t before, bool strided);

  const at::Tensor& tensor() const { return tensor_; }

  // Returns whether the bytes around and between the tensor's elements are as they were.
  bool Intact() const;

 private:
  static constexpr int64_t kAfter = 3;
  static constexpr int kGuard = 0x55;

  at::Tensor bytes_;
  at::Tensor tensor_;
};

// An operation of one rank that is in progress.
struct Running {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<GuardedTensor> inputs;  // empty when the operation is in place
  std::vector<GuardedTensor> outputs;
  std::string launch_error;
};

// The end of one rank's operation.
struct Outcome {
  std::vector<at::Tensor> outputs;
  std::string error;  // "" unless the operation failed, or changed memory that is not its own
};

// Makes the tensors and starts the operation.
Running Launch(const TestRank& self, const Case& c);

// Waits for the operation, and takes its result.
Outcome Finish(const TestRank& self, const Case& c, const Running& running);

// Returns the first difference from `expected`, or "".
std::string Difference(const std::vector<at::Tensor>& actual,
                       const std::vector<at::Tensor>& expected);

// Runs `cases` in order on the rank, at most `depth` at a time. Waits for those in reverse order.
std::vector<Outcome> RunCases(const TestRank& self, const std::vector<Case>& cases, size_t depth);

}  // namespace ddp::internal

#endif  // DDP_COMM_CONFORMANCE_CASE_RUN_H_
