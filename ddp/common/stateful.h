#ifndef DDP_COMMON_STATEFUL_H_
#define DDP_COMMON_STATEFUL_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/common/error.h"

namespace ddp {

// A value that JSON can hold. Whoever writes a double writes all its bits, infinity and NaN too.
using StateValue =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

// The state of an object between two steps, as tensors and values by name. A "/" in a name
// separates the name of a part from a name in that part.
struct SavedState {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, StateValue> values;

  // Returns the value of this name. Throws ConfigurationError when there is none of type T.
  template <typename T>
  const T& value(const std::string& name) const {
    const auto found = values.find(name);
    const T* value = found == values.end() ? nullptr : std::get_if<T>(&found->second);
    if (value != nullptr) return *value;
    throw ConfigurationError("the saved state has " +
                             std::string(found == values.end() ? "no value" : "another type of") +
                             " \"" + name + "\"; it was saved by another class or version");
  }

  // Returns the tensor of this name. Throws ConfigurationError when there is none.
  const at::Tensor& tensor(const std::string& name) const {
    const auto found = tensors.find(name);
    if (found != tensors.end()) return found->second;
    throw ConfigurationError("the saved state has no tensor \"" + name +
                             "\"; it was saved by another class or version");
  }

  // Adds all of `part` under the names "prefix/...".
  void add_part(const std::string& prefix, const SavedState& part) {
    for (const auto& [name, tensor] : part.tensors) tensors[prefix + "/" + name] = tensor;
    for (const auto& [name, value] : part.values) values[prefix + "/" + name] = value;
  }

  // Returns what add_part() added under this prefix.
  SavedState part(const std::string& prefix) const {
    SavedState result;
    const std::string start = prefix + "/";
    for (const auto& [name, tensor] : tensors) {
      if (name.starts_with(start)) result.tensors[name.substr(start.size())] = tensor;
    }
    for (const auto& [name, value] : values) {
      if (name.starts_with(start)) result.values[name.substr(start.size())] = value;
    }
    return result;
  }
};

// An object whose state a checkpoint keeps: schedulers, loss scalers, averaged models, and classes
// of the program.
class Stateful {
 public:
  virtual ~Stateful() = default;

  // Returns the state. Tensors may share memory with the object: copy them before its next step.
  // Not a collective.
  virtual SavedState save_state() const = 0;

  // Takes the state that an object of the same class has saved. Tensors are copied. Not a
  // collective: call it on every rank with equal states. Throws ConfigurationError, and changes
  // nothing, when a value is missing or does not fit.
  virtual void load_state(const SavedState& state) = 0;
};

}  // namespace ddp

#endif  // DDP_COMMON_STATEFUL_H_
