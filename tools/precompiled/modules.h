// The headers that tests with modules and optimizers share, precompiled.
#ifndef DDP_TOOLS_PRECOMPILED_MODULES_H_
#define DDP_TOOLS_PRECOMPILED_MODULES_H_

#include <torch/torch.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#endif  // DDP_TOOLS_PRECOMPILED_MODULES_H_
