// The headers of others that tests with LibTorch share. They are compiled once for all tests: that
// takes as long as two of these tests. A test includes what it uses nevertheless: with another
// compiler, or other flags, nothing else is there.
#ifndef DDP_TOOLS_PRECOMPILED_TORCH_TEST_H_
#define DDP_TOOLS_PRECOMPILED_TORCH_TEST_H_

#include <torch/torch.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#endif  // DDP_TOOLS_PRECOMPILED_TORCH_TEST_H_
