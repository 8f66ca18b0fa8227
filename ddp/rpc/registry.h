#ifndef DDP_RPC_REGISTRY_H_
#define DDP_RPC_REGISTRY_H_

#include <cctype>
#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "ddp/common/error.h"
#include "ddp/rpc/object_table.h"
#include "ddp/rpc/value.h"

namespace ddp::rpc {

// The functions and classes that other workers may call on this worker, by name.
//
//   rpc::Registry registry;
//   registry.function("lookup", [&](at::Tensor ids) { return table.index_select(0, ids); });
//   registry.module<Shard, int64_t, int64_t>("Shard").method("forward", &Shard::forward);
//
// The callee checks number and types of the arguments before it calls; the caller gets a
// RemoteError. Types: those of Value (value.h); const references to them are allowed. A function
// may be called by several threads at once, and may call other workers. Objects of a class too: a
// class with state that changes needs a lock of its own.
//
// Fill it before init(), which takes it. A name holds letters, digits and "_", in parts with a "."
// between them. A name that begins with "ddp.", another character, and a second function or class
// of a name throw ConfigurationError. Thread-compatible.
class Registry {
 public:
  using Arguments = std::vector<c10::IValue>;
  using Handler = std::function<c10::IValue(internal::ObjectTable&, const Arguments&)>;

  // Registers a function object; its operator() has one form.
  template <typename F>
  Registry& function(const std::string& name, F f) {
    CheckOwnName(name);
    Add(name, Wrap(name, std::function(std::move(f))));
    return *this;
  }

  template <typename T>
  class Methods {
   public:
    template <typename R, typename... A>
    Methods& method(const std::string& name, R (T::*method)(A...)) {
      return Add(name, std::function<R(T&, A...)>(method));
    }
    template <typename R, typename... A>
    Methods& method(const std::string& name, R (T::*method)(A...) const) {
      return Add(name, std::function<R(T&, A...)>(method));
    }

   private:
    friend class Registry;
    Methods(Registry* registry, std::string class_name)
        : registry_(registry), class_name_(std::move(class_name)) {}

    template <typename R, typename... A>
    Methods& Add(const std::string& name, std::function<R(T&, A...)> f) {
      const std::string full = class_name_ + "." + name;
      registry_->Add(full, WrapMethod<T>(full, std::move(f)));
      return *this;
    }

    Registry* const registry_;
    const std::string class_name_;
  };

  // Registers a class that remote<T>() makes with arguments of the types A. Its parameters(), where
  // it has that method as nn::Module does, are what a DistributedOptimizer updates.
  template <typename T, typename... A>
  Methods<T> module(const std::string& name) {
    CheckOwnName(name);
    const auto [known, inserted] = class_names_.emplace(typeid(T), name);
    if (!inserted) throw ConfigurationError(known->second + " and " + name + " are one class");
    const std::string full = name + ".new";
    Add(full, [full, name](internal::ObjectTable& objects, const Arguments& arguments) {
      const auto make = [](A... parts) { return std::make_shared<T>(std::move(parts)...); };
      auto instance = Apply<std::decay_t<A>...>(full, 0, arguments, make);
      return c10::IValue(objects.Add(ObjectOf(std::move(instance), name)));
    });
    return Methods<T>(this, name);
  }

  // Returns the registered name of a class. Throws ConfigurationError when there is none.
  template <typename T>
  const std::string& class_name() const {
    const auto found = class_names_.find(typeid(T));
    if (found == class_names_.end()) {
      throw ConfigurationError(
          "the class is not registered on this worker: register the same "
          "classes on all workers that use it");
    }
    return found->second;
  }

  template <typename T>
  static internal::RemoteObject ObjectOf(std::shared_ptr<T> instance, std::string class_name) {
    internal::RemoteObject object{.instance = instance,
                                  .type = typeid(T),
                                  .class_name = std::move(class_name),
                                  .parameters = {}};
    if constexpr (requires {
                    { instance->parameters() } -> std::convertible_to<std::vector<at::Tensor>>;
                  }) {
      object.parameters = [instance] { return instance->parameters(); };
    }
    return object;
  }

  // Throws ConfigurationError, with the program's names, for an unknown one.
  const Handler& Find(const std::string& name) const {
    const auto found = handlers_.find(name);
    if (found != handlers_.end()) return found->second;
    std::string known;
    for (const auto& [other, handler] : handlers_) {
      if (!other.starts_with(kLibrary)) known += (known.empty() ? "" : ", ") + other;
    }
    throw ConfigurationError("no such function is registered; there are: " + known);
  }

  // For the library itself, whose names begin with kLibrary.
  void Add(const std::string& name, Handler handler) {
    CheckName(name);
    if (!handlers_.emplace(name, std::move(handler)).second) {
      throw ConfigurationError("the name " + name + " is registered twice");
    }
  }

  // Throws ConfigurationError for a name that cannot be registered.
  static void CheckName(const std::string& name) {
    bool begins = true;  // of a part between dots
    for (const char c : name) {
      if (begins && c == '.') break;
      begins = c == '.';
      if (!begins && !std::isalnum(static_cast<unsigned char>(c)) && c != '_') {
        throw ConfigurationError("the name \"" + name +
                                 "\" has other characters than letters, "
                                 "digits, _ and .");
      }
    }
    if (begins) throw ConfigurationError("the name \"" + name + "\" has an empty part");
  }

 private:
  static constexpr char kLibrary[] = "ddp.";

  static void CheckOwnName(const std::string& name) {
    if (name.starts_with(kLibrary)) {
      throw ConfigurationError("the name \"" + name + "\" begins with \"ddp.\", as only the " +
                               "library's own names do");
    }
  }

  template <typename... Types>
  static std::string Signature(const std::string& name) {
    std::string types;
    ((types += (types.empty() ? "" : ", ") + Value<Types>::Name()), ...);
    return name + "(" + types + ")";
  }

  // `signature` makes a text for errors.
  template <typename T, typename S>
  static T Argument(const S& signature, const c10::IValue& value, size_t number) {
    try {
      return Value<T>::From(value);
    } catch (const ConfigurationError& error) {
      throw ConfigurationError("argument " + std::to_string(number) + " of " + signature() + ": " +
                               error.what_without_backtrace());
    }
  }

  // Calls `f` with the arguments from number `first` on.
  template <typename... Types, typename F>
  static auto Apply(const std::string& name, size_t first, const Arguments& arguments, const F& f) {
    const auto signature = [&] { return Signature<Types...>(name); };
    if (arguments.size() != first + sizeof...(Types)) {
      throw ConfigurationError(signature() + " got " + std::to_string(arguments.size() - first) +
                               " arguments");
    }
    return [&]<size_t... I>(std::index_sequence<I...>) {
      // A braced list keeps the order of evaluation.
      std::tuple<Types...> values{Argument<Types>(signature, arguments[first + I], I + 1)...};
      return f(std::get<I>(std::move(values))...);
    }
    (std::index_sequence_for<Types...>());
  }

  template <typename R, typename F>
  static c10::IValue Result(const F& call) {
    if constexpr (std::is_void_v<R>) {
      call();
      return c10::IValue();
    } else {
      return Value<std::decay_t<R>>::To(call());
    }
  }

  template <typename R, typename... A>
  static Handler Wrap(const std::string& name, std::function<R(A...)> f) {
    return [name, f = std::move(f)](internal::ObjectTable&, const Arguments& arguments) {
      return Result<R>([&] { return Apply<std::decay_t<A>...>(name, 0, arguments, f); });
    };
  }

  template <typename T, typename R, typename... A>
  static Handler WrapMethod(const std::string& name, std::function<R(T&, A...)> f) {
    return [name, f = std::move(f)](internal::ObjectTable& objects, const Arguments& arguments) {
      if (arguments.empty()) throw ConfigurationError(name + " needs an object");
      const internal::RemoteObject object = objects.Get(Value<int64_t>::From(arguments[0]));
      if (object.type != std::type_index(typeid(T))) {
        throw ConfigurationError("the object is a " + object.class_name);
      }
      T& instance = *static_cast<T*>(object.instance.get());
      const auto bound = [&](std::decay_t<A>... parts) -> R {
        return f(instance, std::move(parts)...);
      };
      return Result<R>([&] { return Apply<std::decay_t<A>...>(name, 1, arguments, bound); });
    };
  }

  std::map<std::string, Handler> handlers_;
  std::map<std::type_index, std::string> class_names_;
};

}  // namespace ddp::rpc

#endif  // DDP_RPC_REGISTRY_H_
