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

struct TypesOfFields {
  template <typename... Ts>
  constexpr auto operator()(const std::remove_reference_t<Ts>&...) const {
    return std::type_identity<std::tuple<Ts...>>();
  }
};

}  // namespace aggregate

// DDP_TYPES(a, b, ...) is decltype(a), decltype(b), ... for up to 27 names.
#define DDP_TYPES(...) DDP_SCAN(DDP_TYPE(__VA_ARGS__))
#define DDP_SCAN(...) DDP_SCAN_9(DDP_SCAN_9(DDP_SCAN_9(__VA_ARGS__)))  // expands 27 times
#define DDP_SCAN_9(...) DDP_SCAN_3(DDP_SCAN_3(DDP_SCAN_3(__VA_ARGS__)))
#define DDP_SCAN_3(...) DDP_SCAN_1(DDP_SCAN_1(DDP_SCAN_1(__VA_ARGS__)))
#define DDP_SCAN_1(...) __VA_ARGS__
#define DDP_TYPE(name, ...) decltype(name) __VA_OPT__(, DDP_TYPE_AGAIN DDP_PARENS(__VA_ARGS__))
#define DDP_TYPE_AGAIN() DDP_TYPE
#define DDP_PARENS ()

#define DDP_FIELDS(count, ...)                                          \
  if constexpr (kCount == count) {                                      \
    auto& [__VA_ARGS__] = value;                                        \
    return fn.template operator()<DDP_TYPES(__VA_ARGS__)>(__VA_ARGS__); \
  } else

// Calls fn.operator()<Fields...>(fields...) with all fields of `value`, a plain struct. `Fields`
// are the declared types. If `value` is const, they are const too, except references. Let fn take
// const std::remove_reference_t<Fields>&...: no other reference binds to a bit-field. A bit-field
// arrives as a copy. Every other field arrives by reference: fn may cast it to
// std::remove_reference_t<Field>&, which is as constant as the field.
template <typename T, typename F>
constexpr decltype(auto) WithFields(T& value, F&& fn) {
  constexpr size_t kCount = kFieldCount<std::remove_const_t<T>>;
  static_assert(kCount > 0);
  // clang-format off
  DDP_FIELDS(1, a)
  DDP_FIELDS(2, a, b)
  DDP_FIELDS(3, a, b, c)
  DDP_FIELDS(4, a, b, c, d)
  DDP_FIELDS(5, a, b, c, d, e)
  DDP_FIELDS(6, a, b, c, d, e, f)
  DDP_FIELDS(7, a, b, c, d, e, f, g)
  DDP_FIELDS(8, a, b, c, d, e, f, g, h)
  DDP_FIELDS(9, a, b, c, d, e, f, g, h, i)
  DDP_FIELDS(10, a, b, c, d, e, f, g, h, i, j)
  DDP_FIELDS(11, a, b, c, d, e, f, g, h, i, j, k)
  DDP_FIELDS(12, a, b, c, d, e, f, g, h, i, j, k, l)
  DDP_FIELDS(13, a, b, c, d, e, f, g, h, i, j, k, l, m)
  DDP_FIELDS(14, a, b, c, d, e, f, g, h, i, j, k, l, m, n)
  DDP_FIELDS(15, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o)
  DDP_FIELDS(16, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
  DDP_FIELDS(17, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q)
  DDP_FIELDS(18, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r)
  DDP_FIELDS(19, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s)
  DDP_FIELDS(20, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t)
  DDP_FIELDS(21, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u)
  DDP_FIELDS(22, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v)
  DDP_FIELDS(23, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w)
  DDP_FIELDS(24, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x)
  {}
  // clang-format on
}

#undef DDP_FIELDS
#undef DDP_TYPES
#undef DDP_SCAN
#undef DDP_SCAN_3
#undef DDP_SCAN_1
#undef DDP_TYPE
#undef DDP_TYPE_AGAIN
#undef DDP_PARENS

// std::tuple<Fields...> with the Fields of WithFields(). For computing with types only: do not
// create such a tuple.
template <typename T>
using FieldTypes =
    typename decltype(WithFields(std::declval<T&>(), aggregate::TypesOfFields()))::type;

}  // namespace ddp::internal

#endif  // DDP_AGGREGATE_FIELDS_H_
