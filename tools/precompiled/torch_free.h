// The headers that tests without LibTorch share, precompiled.
#ifndef DDP_TOOLS_PRECOMPILED_TORCH_FREE_H_
#define DDP_TOOLS_PRECOMPILED_TORCH_FREE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#endif  // DDP_TOOLS_PRECOMPILED_TORCH_FREE_H_
