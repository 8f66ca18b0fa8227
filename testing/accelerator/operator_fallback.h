#ifndef DDP_TESTING_ACCELERATOR_OPERATOR_FALLBACK_H_
#define DDP_TESTING_ACCELERATOR_OPERATOR_FALLBACK_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ddp::testing {

// Returns the CPU tensor that a kernel sees in place of the device's `tensor`: the same elements,
// in the mapping that kernels use. It does not keep the memory alive: a task that runs after the
// memory was reused sees what the new owner wrote.
at::Tensor KernelView(const at::Tensor& tensor);

// Whether the calling thread runs a kernel of the CPU's for the device.
bool InKernel();

// Runs the operator on the device, boxed, for each operator without a kernel of the device's own.
//
// The results' shapes come from the operator's Meta kernel, else from a run on zeros. A task of the
// current stream then runs the CPU kernel on kernel views. An operator whose result the host needs
// (a number, a shape that depends on the data) first synchronizes the stream.
//
// An operator that draws random numbers draws those that the CPU would draw from the state of the
// device's generator.
void RunOnDevice(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_OPERATOR_FALLBACK_H_
