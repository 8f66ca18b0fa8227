#ifndef DDP_BASE_ENVIRONMENT_H_
#define DDP_BASE_ENVIRONMENT_H_

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

namespace ddp {

// A function that returns the value of an environment variable; nullopt when the variable is unset.
// Code that takes one is tested without a real environment.
using VariableGetter = std::function<std::optional<std::string>(const std::string& name)>;

// The VariableGetter of this process. No thread may change the environment meanwhile.
inline std::optional<std::string> EnvironmentVariable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

}  // namespace ddp

#endif  // DDP_BASE_ENVIRONMENT_H_
