// for_each_tensor: visits the tensors inside a value of any type, such as the inputs and outputs of
// a module.
//
//   ddp::for_each_tensor(outputs, [&](const at::Tensor& tensor) { Use(tensor); });
//
// The visit goes into these types, nested to any depth:
// - at::Tensor and classes derived from it;
// - std::vector, array, deque, list, span, C arrays and every other range that can be read twice;
// - the values of maps and of torch::OrderedDict;
// - std::pair, tuple, optional, variant, reference_wrapper;
// - std::unique_ptr, std::shared_ptr and c10::intrusive_ptr to any of these;
// - c10::IValue, c10::List, c10::Dict;
// - plain structs of up to 24 fields without base classes, see aggregate_fields.h;
// - a class with a function for_each_tensor_in, see below.
// Other types are skipped.
//
// For a class of your own, or a struct that is not plain, write a function in its namespace:
//
//   namespace mine {
//   class Prediction { ... };
//   template <typename F>
//   void for_each_tensor_in(Prediction& prediction, F&& visit) {  // and, or only, a const one
//     visit(prediction.scores());
//     ddp::for_each_tensor(prediction.boxes(), visit);
//   }
//   }
//
// This function has priority over every other rule. Also write one if the compiler reports that it
// cannot decompose your struct.
//
// Shared parts (shared_ptr, IValue, List, Dict) are visited once for every place that refers to
// them. Replacing a tensor in a shared part replaces it for all owners. Cycles of pointers lead to
// endless recursion.
#ifndef DDP_TENSOR_TRAVERSAL_H_
#define DDP_TENSOR_TRAVERSAL_H_

#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include <ATen/core/Tensor.h>

#include "ddp/aggregate_fields.h"

namespace c10 {
template <class T>
class List;
template <class Key, class Value>
class Dict;
struct IValue;
}  // namespace c10

namespace ddp {
namespace internal::traversal {

// The possible contents of a type, as a set of bits.
constexpr unsigned kNothing = 0;
constexpr unsigned kTensors = 1;
constexpr unsigned kUnknown = 2;  // a class that the visit cannot go into

struct Probe {
  void operator()(const at::Tensor&) const {}
};

template <typename T>
concept HasCustomization = requires(T& value, Probe& probe) {
  for_each_tensor_in(value, probe);
};

template <typename T>
concept IsComplete = requires {
  sizeof(T);
};

template <typename T, template <typename...> class Template>
constexpr bool kIs = false;
template <template <typename...> class Template, typename... Arguments>
constexpr bool kIs<Template<Arguments...>, Template> = true;

// True for types that can be null and have an operator* to their contents.
template <typename T>
constexpr bool kIsPointerLike = kIs<T, std::optional> || kIs<T, std::shared_ptr> ||
                                kIs<T, std::unique_ptr> || kIs<T, c10::intrusive_ptr>;

template <typename T>
concept IsMap = std::ranges::forward_range<T> && requires {
  typename T::mapped_type;
};

// True for the items of torch::OrderedDict, and for types with the same functions.
template <typename T>
concept IsItem = requires(T& item) {
  item.key();
  item.value();
};

template <typename T, typename... Seen>
constexpr unsigned Contents();

// Returns the contents of T, without const or reference. Seen: the types that contain T. Returns
// kNothing when T is one of them, as in a tree: its contents are counted already.
template <typename T, typename... Seen>
constexpr unsigned ContentsOnce() {
  using Plain = std::remove_cvref_t<T>;
  if constexpr ((std::is_same_v<Plain, Seen> || ...)) {
    return kNothing;
  } else {
    return Contents<Plain, Seen...>();
  }
}

template <typename List, typename... Seen>
struct ContentsOfList;
template <template <typename...> class List, typename... Ts, typename... Seen>
struct ContentsOfList<List<Ts...>, Seen...> {
  static constexpr unsigned kContents = (kNothing | ... | ContentsOnce<Ts, Seen...>());
};

template <typename T, typename... Seen>
constexpr unsigned ContentsOfRange() {
  using Element = std::remove_cvref_t<std::ranges::range_reference_t<T&>>;
  if constexpr (IsMap<T>) {
    return ContentsOnce<typename T::mapped_type, T, Seen...>();
  } else if constexpr (IsItem<Element>) {
    return ContentsOnce<decltype(std::declval<Element&>().value()), T, Seen...>();
  } else {
    return ContentsOnce<Element, T, Seen...>();
  }
}

template <typename T, typename... Seen>
constexpr unsigned ContentsOfClass() {
  if constexpr (kIsPointerLike<T>) {
    if constexpr (requires(T & value) { *value; }) {
      return ContentsOnce<decltype(*std::declval<T&>()), T, Seen...>();
    } else {
      return kUnknown;  // a unique_ptr to an array
    }
  } else if constexpr (kIs<T, std::reference_wrapper>) {
    return ContentsOnce<typename T::type, T, Seen...>();
  } else if constexpr (kIs<T, std::pair> || kIs<T, std::tuple> || kIs<T, std::variant>) {
    return ContentsOfList<T, T, Seen...>::kContents;
  } else if constexpr (kIs<T, c10::List>) {
    return ContentsOnce<typename T::value_type, T, Seen...>();
  } else if constexpr (kIs<T, c10::Dict>) {
    return ContentsOnce<typename T::mapped_type, T, Seen...>();
  } else if constexpr (std::ranges::forward_range<T&>) {
    return ContentsOfRange<T, Seen...>();
  } else if constexpr (std::is_empty_v<T>) {
    return kNothing;
  } else if constexpr (kFieldCount<T> > 0) {
    return ContentsOfList<FieldTypes<T>, T, Seen...>::kContents;
  } else {
    return kUnknown;
  }
}

// Returns the contents of a type without const or reference. Seen: the types that contain it.
template <typename T, typename... Seen>
constexpr unsigned Contents() {
  if constexpr (std::is_pointer_v<T>) {
    return std::is_class_v<std::remove_pointer_t<T>> ? kUnknown : kNothing;
  } else if constexpr (std::is_scalar_v<T> || std::is_void_v<T> || std::is_function_v<T>) {
    return kNothing;
  } else if constexpr (std::is_array_v<T>) {
    return ContentsOnce<std::remove_all_extents_t<T>, Seen...>();
  } else if constexpr (!IsComplete<T>) {
    return kUnknown;
  } else if constexpr (HasCustomization<T> || std::is_base_of_v<at::Tensor, T> ||
                       std::is_same_v<T, c10::IValue>) {
    return kTensors;
  } else {
    return ContentsOfClass<T, Seen...>();
  }
}

template <typename F>
void Call(at::Tensor& tensor, F& fn) {
  fn(tensor);
}

// Skips a constant tensor when the function only takes tensors that it can change.
template <typename F>
void Call(const at::Tensor& tensor, F& fn) {
  if constexpr (std::is_invocable_v<F&, const at::Tensor&>) fn(tensor);
}

template <typename T, typename F>
void Visit(T& value, F& fn);

// The function that a customization gets: takes constant and other tensors.
template <typename F>
struct Visitor {
  template <typename T>
  requires std::is_base_of_v<at::Tensor, std::remove_const_t<T>>
  void operator()(T& tensor) const { Visit(tensor, fn); }
  F& fn;
};

template <typename T, typename F>
struct FieldVisitor {
  template <typename... Fields>
  void operator()(const std::remove_reference_t<Fields>&... fields) const {
    (VisitField<Fields>(fields), ...);
  }

  // Visits one field. Only the parameter adds the const, see WithFields().
  template <typename Field>
  void VisitField(const std::remove_reference_t<Field>& field) const {
    if constexpr ((ContentsOnce<Field>() & kTensors) != 0) {
      Visit(const_cast<std::remove_reference_t<Field>&>(field), fn);
    }
  }
  F& fn;
};

// Visits the elements of a c10::List. They are behind proxies: each is read and, unless the list is
// const, written back.
template <typename List, typename F>
void VisitList(List& list, F& fn) {
  for (size_t i = 0; i < list.size(); ++i) {
    typename std::remove_const_t<List>::value_type element = list.get(i);
    if constexpr (std::is_const_v<List>) {
      Visit(std::as_const(element), fn);
    } else {
      Visit(element, fn);
      list.set(i, std::move(element));
    }
  }
}

template <typename Dict, typename F>
void VisitDict(Dict& dict, F& fn) {
  for (const auto& entry : dict) {
    typename std::remove_const_t<Dict>::mapped_type element = entry.value();
    if constexpr (std::is_const_v<Dict>) {
      Visit(std::as_const(element), fn);
    } else {
      Visit(element, fn);
      entry.setValue(std::move(element));
    }
  }
}

// Visits an IValue. A template, so that only programs that use an IValue need its header.
template <typename IValue, typename F>
void VisitIValue(IValue& value, F& fn) {
  if (value.isTensor()) {
    Visit(value.toTensor(), fn);
  } else if (value.isList()) {
    std::conditional_t<std::is_const_v<IValue>, const c10::List<c10::IValue>,
                       c10::List<c10::IValue>>
        list = value.toList();
    Visit(list, fn);
  } else if (value.isGenericDict()) {
    std::conditional_t<std::is_const_v<IValue>, const c10::Dict<c10::IValue, c10::IValue>,
                       c10::Dict<c10::IValue, c10::IValue>>
        dict = value.toGenericDict();
    Visit(dict, fn);
  } else if (value.isTuple()) {
    const auto tuple = value.toTuple();
    for (size_t i = 0; i < tuple->size(); ++i) {
      std::remove_const_t<IValue> element = tuple->elements()[i];
      if constexpr (std::is_const_v<IValue>) {
        Visit(std::as_const(element), fn);
      } else {
        Visit(element, fn);
        tuple->unsafeSetElement(i, std::move(element));
      }
    }
  }
}

template <typename T, typename F>
void VisitRange(T& range, F& fn) {
  for (auto&& element : range) {
    if constexpr (IsMap<std::remove_const_t<T>>) {
      Visit(element.second, fn);
    } else if constexpr (IsItem<std::remove_cvref_t<decltype(element)>>) {
      auto&& value = element.value();
      Visit(value, fn);
    } else if constexpr (std::is_reference_v<std::ranges::range_reference_t<T&>>) {
      Visit(element, fn);
    } else {
      Visit(std::as_const(element), fn);  // temporary: a change would be lost
    }
  }
}

template <typename T, typename F>
void VisitClass(T& value, F& fn) {
  using Plain = std::remove_const_t<T>;
  if constexpr (kIsPointerLike<Plain>) {
    if (value) Visit(*value, fn);
  } else if constexpr (kIs<Plain, std::reference_wrapper>) {
    Visit(value.get(), fn);
  } else if constexpr (kIs<Plain, std::pair> || kIs<Plain, std::tuple>) {
    std::apply([&fn](auto&... elements) { (Visit(elements, fn), ...); }, value);
  } else if constexpr (kIs<Plain, std::variant>) {
    if (!value.valueless_by_exception()) {
      std::visit([&fn](auto& element) { Visit(element, fn); }, value);
    }
  } else if constexpr (kIs<Plain, c10::List>) {
    VisitList(value, fn);
  } else if constexpr (kIs<Plain, c10::Dict>) {
    VisitDict(value, fn);
  } else if constexpr (std::ranges::forward_range<T&>) {
    VisitRange(value, fn);
  } else {
    WithFields(value, FieldVisitor<T, F>{fn});
  }
}

// Visits a value. T is const for a constant value.
template <typename T, typename F>
void Visit(T& value, F& fn) {
  using Plain = std::remove_const_t<T>;
  if constexpr ((Contents<Plain>() & kTensors) == 0) {
    // T holds no tensors.
  } else if constexpr (HasCustomization<T>) {
    Visitor<F> visitor{fn};
    for_each_tensor_in(value, visitor);
  } else if constexpr (std::is_base_of_v<at::Tensor, Plain>) {
    Call(value, fn);
  } else if constexpr (std::is_same_v<Plain, c10::IValue>) {
    VisitIValue(value, fn);
  } else if constexpr (std::is_array_v<Plain>) {
    for (auto& element : value) Visit(element, fn);
  } else {
    VisitClass(value, fn);
  }
}

}  // namespace internal::traversal

// Calls fn(at::Tensor&) for every tensor in `value`, undefined ones included, in the order of
// elements and fields. A tensor is constant where `value` is, or where its container holds
// constants (at::TensorList, sets). Then the call is fn(const at::Tensor&), or none if `fn` does
// not accept that. An exception of `fn` leaves for_each_tensor.
template <typename T, typename F>
void for_each_tensor(T&& value, F&& fn) {
  internal::traversal::Visit(value, fn);
}

// True when values of type T may hold tensors that for_each_tensor finds.
template <typename T>
inline constexpr bool may_hold_tensors_v = (internal::traversal::ContentsOnce<T>() &
                                            internal::traversal::kTensors) != 0;

// True when T contains a class into which for_each_tensor cannot go. Tensors may be hidden there.
template <typename T>
inline constexpr bool may_hide_tensors_v = (internal::traversal::ContentsOnce<T>() &
                                            internal::traversal::kUnknown) != 0;

}  // namespace ddp

#endif  // DDP_TENSOR_TRAVERSAL_H_
