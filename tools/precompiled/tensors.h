// The headers that tests with tensors share, precompiled.
#ifndef DDP_TOOLS_PRECOMPILED_TENSORS_H_
#define DDP_TOOLS_PRECOMPILED_TENSORS_H_

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#endif  // DDP_TOOLS_PRECOMPILED_TENSORS_H_
