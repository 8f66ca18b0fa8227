#ifndef DDP_RPC_AUTOGRAD_CONTEXT_H_
#define DDP_RPC_AUTOGRAD_CONTEXT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::rpc {

// A forward over several workers, and its backward. The calls that the thread makes while a context
// is open are recorded on both sides; backward() goes back through all of them. The gradients stay
// in the context, on each worker those of its own leaves: `.grad` is not touched.
//
//   rpc::AutogradContext context;
//   at::Tensor rows = rpc::sync<at::Tensor>("ps0", "lookup", ids);
//   context.backward(loss(model->forward(rows)));   // a DistributedDataParallel averages as always
//   optimizer.step(context);                        // a DistributedOptimizer
//
// One context for each thread at a time; each worker may have its own at the same time. LibTorch
// keeps a context's part on the other workers until the destructor's message arrives.
//
// A DistributedDataParallel reduces its gradients in the context as it does those in `.grad`: the
// same buckets, the same bits, while the backward runs, on the thread that called backward(). Not
// supported there, and refused by an error with the name: mixed_precision with a param_dtype,
// delay_all_reduce_named_params, a Join, no_sync (a later context would not see its gradients), a
// reentrant checkpoint(), an optimizer that steps in the backward, and a DistributedDataParallel in
// a graph that another worker's backward runs through. With gradient_as_bucket_view, gradients of
// the last backward lie in the buckets: read them before the next backward of the model.
//
// Thread-compatible; used and destroyed on the thread that made it.
class AutogradContext {
 public:
  // Throws ConfigurationError without init(), and when this thread has an open context.
  AutogradContext();
  ~AutogradContext();
  AutogradContext(const AutogradContext&) = delete;
  AutogradContext& operator=(const AutogradContext&) = delete;

  // Returns the number of this context, unique among all workers.
  int64_t id() const;

  // Computes the gradients of all leaves on all workers, and reduces those of wrapped models.
  // Blocks until they are complete. A second backward adds to them.
  //
  // Throws, and reduces nothing:
  // - ConfigurationError, before anything runs: a root is no scalar, needs no gradient or is a
  // leaf; a call of
  //   the context failed, or its answer was not taken; the roots do not depend on an answer that
  //   carries a gradient. LibTorch itself waits for such an answer's gradient in vain.
  // - RemoteError: an operation of the graph threw, on worker(), which may be this one.
  // - TimeoutError, PeerFailedError: as a call.
  // - what a backward of a DistributedDataParallel throws; its peers then get a failure report.
  // After any of them but the first: begin a new context.
  void backward(const at::Tensor& loss, bool retain_graph = false);
  void backward(const std::vector<at::Tensor>& roots, bool retain_graph = false);

  // Returns the gradient of a leaf of this worker; undefined: it has none. Not while a backward
  // runs.
  at::Tensor grad(const at::Tensor& leaf) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp::rpc

#endif  // DDP_RPC_AUTOGRAD_CONTEXT_H_
