#ifndef DDP_GRAPH_TRACE_CAPTURE_H_
#define DDP_GRAPH_TRACE_CAPTURE_H_

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/graph/captured_graph.h"

namespace ddp::internal {

// Runs a forward over the given tensors and returns the tensors of its result.
using TracedForward = std::function<std::vector<at::Tensor>(std::vector<at::Tensor> arguments)>;

struct NamedState {
  std::string name;
  at::Tensor tensor;
};

// Records one call of a forward as a graph, with LibTorch's tracer. The inputs of the graph are
// `arguments` and then `state`: the module's parameters and buffers, each tensor once. Undefined
// tensors are allowed in neither.
//
// The forward runs over copies of the arguments, with gradients enabled and autocast disabled. The
// values of `buffers` (a subset of `state`) and of the random generators are restored at the end,
// also after an exception.
//
// Throws what the forward throws. Throws ConfigurationError with the name of the operation, or with
// the tensor's shape, when a graph would not do what the forward does:
// - an operation runs with gradients disabled: NoGradGuard, or a torch::autograd::Function;
// - an operation gives C++ code a value of a tensor: item(), equal(), a tensor as a condition;
// - the size of a result depends on the values of tensors: masked_select, nonzero, unique, an index
//   that is a mask;
// - an operation reads memory that C++ code has written and no operation has: through data_ptr(),
//   or by a torch::tensor(vector) that converts the vector to another type or device;
// - the forward registers a hook on a tensor that an operation made, or on an argument;
// - the forward reads a tensor that is not in `arguments` or `state`, and `allow_unregistered` is
//   false. A tensor made of numbers in C++ code, as by torch::tensor({...}), is allowed. The result
//   of data() or variable_data() is not;
// - the forward keeps a tensor that it made, in a member for example.
CapturedGraph TraceForward(const std::string& name, const TracedForward& forward,
                           const std::vector<at::Tensor>& arguments,
                           const std::vector<NamedState>& state,
                           const std::vector<at::Tensor>& buffers, bool allow_unregistered);

}  // namespace ddp::internal

#endif  // DDP_GRAPH_TRACE_CAPTURE_H_
