// The macro DDP_OPTION: fields of option structs that a program sets in either of two styles.
//
//   DistributedDataParallelOptions().bucket_cap_mb(25).static_graph(true)
//   DistributedDataParallelOptions{.bucket_cap_mb = 25, .static_graph = true}
//
// A struct declares `using Self` and its fields:
//
//   struct JoinOptions {
//     using Self = JoinOptions;
//     DDP_OPTION(enable, bool) = true;
//   };
//
// A field of type T is assigned, compared and read as a T: options.bucket_cap_mb.has_value().
// options.enable() also reads the field; options.enable(false) sets it and returns the struct. Do
// not call the setter on a copy of a field, such as `auto cap = options.bucket_cap_mb` makes: the
// setter assumes that the field lies in its struct. Write the type instead, or `auto cap =
// options.bucket_cap_mb()`.
#ifndef DDP_OPTION_H_
#define DDP_OPTION_H_

#include <bit>
#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace ddp::internal {

// Holds the value of a field. Derives from T where T is a class, so that the field has T's
// functions.
template <typename T>
class OptionValue {
 public:
  OptionValue() = default;
  OptionValue(T value) : value_(value) {}
  operator const T&() const { return value_; }

 protected:
  T& stored() { return value_; }
  const T& stored() const { return value_; }

 private:
  T value_{};
};

template <typename T>
requires std::is_class_v<T>
class OptionValue<T> : public T {
 public:
  using T::T;
  OptionValue() = default;
  OptionValue(const T& value) : T(value) {}
  OptionValue(T&& value) : T(std::move(value)) {}

 protected:
  T& stored() { return *this; }
  const T& stored() const { return *this; }
};

// Returns the struct of which `field` is the `member`. Relies on the Itanium C++ ABI of g++ and
// clang, in which a pointer to a data member is the member's offset.
template <typename Struct, typename Field>
Struct& StructOf(Field& field, Field Struct::*member) {
  static_assert(sizeof(member) == sizeof(std::ptrdiff_t));
  return *reinterpret_cast<Struct*>(reinterpret_cast<std::byte*>(&field) -
                                    std::bit_cast<std::ptrdiff_t>(member));
}

}  // namespace ddp::internal

// Declares a field: DDP_OPTION(name, type) = default;
#define DDP_OPTION(name, ...)                                                             \
  struct name##_field : ::ddp::internal::OptionValue<__VA_ARGS__> {                       \
    using Value = __VA_ARGS__;                                                            \
    using OfValue = ::ddp::internal::OptionValue<Value>;                                  \
    using OfValue::OfValue;                                                               \
    template <typename Other>                                                             \
    requires std::is_assignable_v<Value&, Other> name##_field& operator=(Other&& other) { \
      OfValue::stored() = std::forward<Other>(other);                                     \
      return *this;                                                                       \
    }                                                                                     \
    const Value& operator()() const { return OfValue::stored(); }                         \
    Self& operator()(Value value) {                                                       \
      OfValue::stored() = std::move(value);                                               \
      return ::ddp::internal::StructOf(*this, &Self::name);                               \
    }                                                                                     \
    template <std::same_as<name##_field> Field>                                           \
    friend bool operator==(const Field& a, const Field& b) {                              \
      return a() == b();                                                                  \
    }                                                                                     \
  } name

#endif  // DDP_OPTION_H_
