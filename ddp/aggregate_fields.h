// Access to the fields of a plain struct without help from its author. (C++20 has no reflection.)
//
// A struct is plain if it is an aggregate (all fields public, no constructors) without base classes
// and with 1 to 24 fields. The number of fields follows from the number of values that can
// initialize the struct. A structured binding then names the fields. No field is copied, moved or
// created.
//
// kFieldCount is 0, so the struct is not looked into, for: base classes, more than 24 fields, and
// arrays that make the struct need more than 64 initial values. The compiler rejects these: unions,
// and structs with an anonymous union. It also rejects a field that has a default value and that
// cannot be created without one.
#ifndef DDP_AGGREGATE_FIELDS_H_
#define DDP_AGGREGATE_FIELDS_H_

#include <algorithm>
#include <cstddef>
#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>

namespace ddp::internal {
namespace aggregate {

constexpr size_t kMaxFields = 24;
constexpr size_t kMaxInitializers = 64;  // more than fields: an array needs one per element

// Converts to any type except Struct and its bases, so that one value initializes one field. Never
// called in a running program; defined because compilers warn of undefined functions.
template <typename Struct>
struct AnyValue {
  template <typename T>
  requires(!std::is_base_of_v<T, Struct>) operator T() const noexcept { std::terminate(); }
};

// Does the same for structs with reference fields. (Not used for all structs: it cannot initialize
// a type that cannot be moved.)
template <typename Struct>
struct AnyReference {
  template <typename T>
  requires(!std::is_base_of_v<T, Struct>) operator T&() const& noexcept { std::terminate(); }
  template <typename T>
  requires(!std::is_base_of_v<T, Struct>) operator T&&() const&& noexcept { std::terminate(); }
};

template <typename Struct>
struct AnyBase {
  template <typename T>
  requires(std::is_base_of_v<T, Struct> && !std::is_same_v<T, Struct>) operator T() const noexcept {
    std::terminate();
  }
};

template <typename Any, size_t>
using Repeat = Any;

template <typename T, typename Any, size_t... I>
constexpr bool TakesSequence(std::index_sequence<I...>) {
  return requires { T{Repeat<Any, I>{}...}; };
}

// True when T can be initialized with `count` values.
template <typename T, typename Any, size_t count>
constexpr bool kTakes = TakesSequence<T, Any>(std::make_index_sequence<count>());

template <typename T, typename Any, size_t... I, size_t... J>
constexpr bool TakesBracesSequence(std::index_sequence<I...>, std::index_sequence<J...>) {
  return requires { T{Repeat<Any, I>{}..., {}, Repeat<Any, J>{}...}; };
}

// True when T can be initialized with `before` values, a pair of braces and `after` more values.
template <typename T, typename Any, size_t before, size_t after>
constexpr bool kTakesBraces = TakesBracesSequence<T, Any>(std::make_index_sequence<before>(),
                                                          std::make_index_sequence<after>());

// Returns the largest number of values, at most `most`, that can initialize T; 0 if there is none.
template <typename T, typename Any, size_t most>
constexpr size_t InitializerCount() {
  if constexpr (most == 0 || kTakes<T, Any, most>) {
    return most;
  } else {
    return InitializerCount<T, Any, most - 1>();
  }
}

// Returns how many of the `total` initial values the field takes that starts at value `index`:
// more than 1 only for an array. The function puts `{}` in place of the field's values, which is
// right for a field of any type, and tries how many values may follow. The others are the field's.
// For `int a[3]; int b;` `total` is 4, and 1 value may follow `{}`: `a` takes 3. (Returns 1 for a
// field that braces cannot initialize.)
template <typename T, typename Any, size_t index, size_t total, size_t guess = 1>
constexpr size_t InitializersOfField() {
  if constexpr (index + guess > total) {
    return 1;
  } else if constexpr (kTakesBraces<T, Any, index, total - index - guess>) {
    return guess;
  } else {
    return InitializersOfField<T, Any, index, total, guess + 1>();
  }
}

template <typename T, typename Any, size_t index, size_t total>
constexpr size_t CountFrom() {
  if constexpr (index >= total) {
    return 0;
  } else {
    return 1 + CountFrom<T, Any, index + InitializersOfField<T, Any, index, total>(), total>();
  }
}

template <typename T>
constexpr size_t Count() {
  if constexpr (!std::is_class_v<T> || !std::is_aggregate_v<T> || std::is_empty_v<T>) {
    return 0;
  } else if constexpr (requires { T{AnyBase<T>{}}; }) {
    return 0;
  } else {
    constexpr size_t kMost = std::min(kMaxInitializers, 8 * sizeof(T) + 1);  // bit-fields
    constexpr size_t kValues = InitializerCount<T, AnyValue<T>, kMost>();
    if constexpr (kValues > 0) {
      return kValues == kMaxInitializers ? 0 : CountFrom<T, AnyValue<T>, 0, kValues>();
    } else {
      constexpr size_t kReferences = InitializerCount<T, AnyReference<T>, kMost>();
      return kReferences == kMaxInitializers ? 0 : CountFrom<T, AnyReference<T>, 0, kReferences>();
    }
  }
}

template <typename T>
constexpr size_t kCount = Count<T>() <= kMaxFields ? Count<T>() : 0;

}  // namespace aggregate

// The number of fields of T; 0 if T is not a plain struct.
template <typename T>
inline constexpr size_t kFieldCount = aggregate::kCount<T>;

namespace aggregate {

template <typename T, typename F>
constexpr decltype(auto) WithFieldsTo24(T& value, F&& f) {
  if constexpr (kFieldCount<std::remove_const_t<T>> == 20) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19,
           f20] = value;
    return f.template
    operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
               decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11),
               decltype(f12), decltype(f13), decltype(f14), decltype(f15), decltype(f16),
               decltype(f17), decltype(f18), decltype(f19), decltype(f20)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 21) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19,
           f20, f21] = value;
    return f.template
    operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
               decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11),
               decltype(f12), decltype(f13), decltype(f14), decltype(f15), decltype(f16),
               decltype(f17), decltype(f18), decltype(f19), decltype(f20), decltype(f21)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20,
        f21);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 22) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19,
           f20, f21, f22] = value;
    return f.template operator()<
        decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
        decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11), decltype(f12),
        decltype(f13), decltype(f14), decltype(f15), decltype(f16), decltype(f17), decltype(f18),
        decltype(f19), decltype(f20), decltype(f21), decltype(f22)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20,
        f21, f22);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 23) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19,
           f20, f21, f22, f23] = value;
    return f.template operator()<
        decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
        decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11), decltype(f12),
        decltype(f13), decltype(f14), decltype(f15), decltype(f16), decltype(f17), decltype(f18),
        decltype(f19), decltype(f20), decltype(f21), decltype(f22), decltype(f23)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20,
        f21, f22, f23);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 24) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19,
           f20, f21, f22, f23, f24] = value;
    return f.template operator()<
        decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
        decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11), decltype(f12),
        decltype(f13), decltype(f14), decltype(f15), decltype(f16), decltype(f17), decltype(f18),
        decltype(f19), decltype(f20), decltype(f21), decltype(f22), decltype(f23), decltype(f24)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20,
        f21, f22, f23, f24);
  }
}

template <typename T, typename F>
constexpr decltype(auto) WithFieldsTo19(T& value, F&& f) {
  if constexpr (kFieldCount<std::remove_const_t<T>> == 15) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15] = value;
    return f.template
    operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
               decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11),
               decltype(f12), decltype(f13), decltype(f14), decltype(f15)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 16) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16] = value;
    return f.template
    operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
               decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11),
               decltype(f12), decltype(f13), decltype(f14), decltype(f15), decltype(f16)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 17) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17] = value;
    return f.template operator()<
        decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
        decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11), decltype(f12),
        decltype(f13), decltype(f14), decltype(f15), decltype(f16), decltype(f17)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 18) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18] = value;
    return f.template operator()<
        decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
        decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11), decltype(f12),
        decltype(f13), decltype(f14), decltype(f15), decltype(f16), decltype(f17), decltype(f18)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 19) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19] =
        value;
    return f.template
    operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
               decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11),
               decltype(f12), decltype(f13), decltype(f14), decltype(f15), decltype(f16),
               decltype(f17), decltype(f18), decltype(f19)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19);
  } else {
    return WithFieldsTo24(value, f);
  }
}

template <typename T, typename F>
constexpr decltype(auto) WithFieldsTo14(T& value, F&& f) {
  if constexpr (kFieldCount<std::remove_const_t<T>> == 9) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9] = value;
    return f.template
    operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
               decltype(f7), decltype(f8), decltype(f9)>(f1, f2, f3, f4, f5, f6, f7, f8, f9);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 10) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10] = value;
    return f
        .template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5),
                             decltype(f6), decltype(f7), decltype(f8), decltype(f9), decltype(f10)>(
            f1, f2, f3, f4, f5, f6, f7, f8, f9, f10);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 11) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11] = value;
    return f.template
    operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5), decltype(f6),
               decltype(f7), decltype(f8), decltype(f9), decltype(f10), decltype(f11)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 12) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12] = value;
    return f.template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                                 decltype(f5), decltype(f6), decltype(f7), decltype(f8),
                                 decltype(f9), decltype(f10), decltype(f11), decltype(f12)>(
        f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 13) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13] = value;
    return f
        .template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5),
                             decltype(f6), decltype(f7), decltype(f8), decltype(f9), decltype(f10),
                             decltype(f11), decltype(f12), decltype(f13)>(
            f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 14) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14] = value;
    return f
        .template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5),
                             decltype(f6), decltype(f7), decltype(f8), decltype(f9), decltype(f10),
                             decltype(f11), decltype(f12), decltype(f13), decltype(f14)>(
            f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14);
  } else {
    return WithFieldsTo19(value, f);
  }
}

template <typename T, typename F>
constexpr decltype(auto) WithFieldsTo8(T& value, F&& f) {
  if constexpr (kFieldCount<std::remove_const_t<T>> == 1) {
    auto& [f1] = value;
    return f.template operator()<decltype(f1)>(f1);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 2) {
    auto& [f1, f2] = value;
    return f.template operator()<decltype(f1), decltype(f2)>(f1, f2);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 3) {
    auto& [f1, f2, f3] = value;
    return f.template operator()<decltype(f1), decltype(f2), decltype(f3)>(f1, f2, f3);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 4) {
    auto& [f1, f2, f3, f4] = value;
    return f.template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4)>(f1, f2, f3,
                                                                                         f4);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 5) {
    auto& [f1, f2, f3, f4, f5] = value;
    return f
        .template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5)>(
            f1, f2, f3, f4, f5);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 6) {
    auto& [f1, f2, f3, f4, f5, f6] = value;
    return f.template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                                 decltype(f5), decltype(f6)>(f1, f2, f3, f4, f5, f6);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 7) {
    auto& [f1, f2, f3, f4, f5, f6, f7] = value;
    return f.template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                                 decltype(f5), decltype(f6), decltype(f7)>(f1, f2, f3, f4, f5, f6,
                                                                           f7);
  } else if constexpr (kFieldCount<std::remove_const_t<T>> == 8) {
    auto& [f1, f2, f3, f4, f5, f6, f7, f8] = value;
    return f.template operator()<decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                                 decltype(f5), decltype(f6), decltype(f7), decltype(f8)>(
        f1, f2, f3, f4, f5, f6, f7, f8);
  } else {
    return WithFieldsTo14(value, f);
  }
}

struct TypesOfFields {
  template <typename... Ts>
  constexpr auto operator()(const std::remove_reference_t<Ts>&...) const {
    return std::type_identity<std::tuple<Ts...>>();
  }
};

}  // namespace aggregate

// Calls f.operator()<Fields...>(fields...) with all fields of `value`, a plain struct. `Fields` are
// the declared types. If `value` is const, they are const too, except references. Let f take
// const std::remove_reference_t<Fields>&...: no other reference binds to a bit-field. A bit-field
// arrives as a copy. Every other field arrives by reference: f may cast it to
// std::remove_reference_t<Field>&, which is as constant as the field.
template <typename T, typename F>
constexpr decltype(auto) WithFields(T& value, F&& f) {
  static_assert(kFieldCount<std::remove_const_t<T>> > 0);
  return aggregate::WithFieldsTo8(value, f);
}

// std::tuple<Fields...> with the Fields of WithFields(). For computing with types only: do not
// create such a tuple.
template <typename T>
using FieldTypes =
    typename decltype(WithFields(std::declval<T&>(), aggregate::TypesOfFields()))::type;

}  // namespace ddp::internal

#endif  // DDP_AGGREGATE_FIELDS_H_
