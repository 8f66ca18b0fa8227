// The headers that libraries with tensors share, precompiled.
#ifndef DDP_TOOLS_PRECOMPILED_LIBRARY_H_
#define DDP_TOOLS_PRECOMPILED_LIBRARY_H_

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#endif  // DDP_TOOLS_PRECOMPILED_LIBRARY_H_
