#ifndef DDP_RPC_VALUE_H_
#define DDP_RPC_VALUE_H_

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "ddp/common/error.h"

namespace ddp::rpc {

// Converts arguments and results of calls: T to the value that travels, and back.
//
//   static std::string Name();                    the type, for messages
//   static c10::IValue To(T value);
//   static T From(const c10::IValue& value);      throws ConfigurationError for another type
//
// Defined for tensors, bool, integers, floating point numbers, std::string, and std::vector,
// std::optional, std::pair and std::tuple of these; for RRef in remote.h. A program may define it
// for a type of its own by these. A vector travels element by element: send a tensor for many
// numbers.
template <typename T>
struct Value;

namespace internal {

[[noreturn]] inline void ThrowOtherType(const std::string& expected, const c10::IValue& value) {
  throw ConfigurationError("expected " + expected + ", got " + value.tagKind());
}

inline const auto& Elements(const std::string& expected, const c10::IValue& value) {
  if (!value.isTuple()) ThrowOtherType(expected, value);
  return value.toTupleRef().elements();
}

// Calls `visit` for each tensor in `value`.
template <typename Visit>
void ForEachTensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (!value.isTuple()) return;
  for (const c10::IValue& element : value.toTupleRef().elements()) ForEachTensor(element, visit);
}

}  // namespace internal

template <>
struct Value<at::Tensor> {
  static std::string Name() { return "Tensor"; }
  static c10::IValue To(at::Tensor value) { return value; }
  static at::Tensor From(const c10::IValue& value) {
    if (!value.isTensor()) internal::ThrowOtherType(Name(), value);
    return value.toTensor();
  }
};

template <>
struct Value<void> {
  static std::string Name() { return "None"; }
  static void From(const c10::IValue& value) {
    if (!value.isNone()) internal::ThrowOtherType(Name(), value);
  }
};

template <>
struct Value<bool> {
  static std::string Name() { return "Bool"; }
  static c10::IValue To(bool value) { return value; }
  static bool From(const c10::IValue& value) {
    if (!value.isBool()) internal::ThrowOtherType(Name(), value);
    return value.toBool();
  }
};

template <std::integral T>
struct Value<T> {
  static std::string Name() { return "Int"; }
  static c10::IValue To(T value) {
    if (!std::in_range<int64_t>(value)) throw ConfigurationError("an integer beyond 64 bits");
    return static_cast<int64_t>(value);
  }
  static T From(const c10::IValue& value) {
    if (!value.isInt()) internal::ThrowOtherType(Name(), value);
    const int64_t number = value.toInt();
    if (!std::in_range<T>(number)) {
      throw ConfigurationError("the number " + std::to_string(number) + " does not fit its type");
    }
    return static_cast<T>(number);
  }
};

template <std::floating_point T>
struct Value<T> {
  static std::string Name() { return "Double"; }
  static c10::IValue To(T value) { return static_cast<double>(value); }
  static T From(const c10::IValue& value) {
    if (!value.isDouble()) internal::ThrowOtherType(Name(), value);
    return static_cast<T>(value.toDouble());
  }
};

template <>
struct Value<std::string> {
  static std::string Name() { return "String"; }
  static c10::IValue To(std::string value) { return value; }
  static std::string From(const c10::IValue& value) {
    if (!value.isString()) internal::ThrowOtherType(Name(), value);
    return value.toStringRef();
  }
};

template <typename T>
struct Value<std::vector<T>> {
  static std::string Name() { return "vector<" + Value<T>::Name() + ">"; }
  static c10::IValue To(std::vector<T> value) {
    std::vector<c10::IValue> elements;
    for (auto&& element : value) elements.push_back(Value<T>::To(std::move(element)));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  static std::vector<T> From(const c10::IValue& value) {
    std::vector<T> result;
    for (const c10::IValue& element : internal::Elements(Name(), value)) {
      result.push_back(Value<T>::From(element));
    }
    return result;
  }
};

template <typename T>
struct Value<std::optional<T>> {
  static std::string Name() { return "optional<" + Value<T>::Name() + ">"; }
  static c10::IValue To(std::optional<T> value) {
    return value.has_value() ? Value<T>::To(*std::move(value)) : c10::IValue();
  }
  static std::optional<T> From(const c10::IValue& value) {
    if (value.isNone()) return std::nullopt;
    return Value<T>::From(value);
  }
};

template <typename... Ts>
struct Value<std::tuple<Ts...>> {
  static std::string Name() {
    std::string names;
    ((names += (names.empty() ? "" : ", ") + Value<Ts>::Name()), ...);
    return "tuple<" + names + ">";
  }
  static c10::IValue To(std::tuple<Ts...> value) {
    std::vector<c10::IValue> elements;
    std::apply([&](auto&... parts) { (elements.push_back(Value<Ts>::To(std::move(parts))), ...); },
               value);
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  static std::tuple<Ts...> From(const c10::IValue& value) {
    const auto& elements = internal::Elements(Name(), value);
    if (elements.size() != sizeof...(Ts)) internal::ThrowOtherType(Name(), value);
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Ts...>{Value<Ts>::From(elements[I])...};
    }
    (std::index_sequence_for<Ts...>());
  }
};

template <typename A, typename B>
struct Value<std::pair<A, B>> {
  static std::string Name() { return Value<std::tuple<A, B>>::Name(); }
  static c10::IValue To(std::pair<A, B> value) {
    return Value<std::tuple<A, B>>::To({std::move(value.first), std::move(value.second)});
  }
  static std::pair<A, B> From(const c10::IValue& value) {
    auto [first, second] = Value<std::tuple<A, B>>::From(value);
    return {std::move(first), std::move(second)};
  }
};

}  // namespace ddp::rpc

#endif  // DDP_RPC_VALUE_H_
