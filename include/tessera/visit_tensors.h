#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Functions that visit the tensors in the arguments and results of a module. Tessera uses them to cast inputs, to
// recompute activations in backward, and to find used parameters.
//
// These functions find tensors in vectors (any range), arrays, tuples, pairs, optionals, maps, unordered maps and
// torch::OrderedDict. A program's own struct is opaque until the program declares the members to visit, in the struct's
// namespace. The members may have any supported type:
//
//   struct Prediction { at::Tensor logits; std::vector<at::Tensor> states; int steps = 0; };
//   template <class Visit>
//   void tessera_visit_tensors(Prediction& value, Visit&& visit) { visit(value.logits, value.states); }
//
// The declaration must precede the first use of the struct with Tessera. checkpointed() copies such a struct. With
// MixedPrecision::cast_forward_inputs, FullyShardedDataParallel also default-constructs a struct and assigns to it.
namespace tessera {

namespace internal {

template <class Value>
concept IsTensor = std::derived_from<std::remove_const_t<Value>, at::Tensor>;
template <class Value>
concept IsOptional = requires(Value& value) {
  value.has_value();
  *value;
};
template <class Value>
concept IsOrderedDict = requires(Value& value) {
  value.begin()->key();
  value.begin()->value();
};
template <class Value>
concept IsMap = requires(Value& value) {
  typename Value::mapped_type;
  value.begin()->second;
};
template <class Value>
concept IsNumber = std::is_arithmetic_v<Value> || std::is_enum_v<Value>;
// Types that cannot contain tensors: numbers, strings, and ranges of numbers.
template <class Value>
concept IsPlain = IsNumber<Value> || std::convertible_to<const Value&, std::string_view> ||
                  requires { requires IsNumber<typename Value::value_type>; };
// Ranges of references, not of proxies. Excludes ranges whose elements have the type of the range, such as JSON values
// and paths.
template <class Value>
concept IsRange = requires(Value& value) {
  value.begin() != value.end();
  requires std::is_lvalue_reference_v<decltype(*value.begin())>;
  requires std::same_as<std::remove_cvref_t<decltype(*value.begin())>, typename Value::value_type>;
  requires !std::same_as<typename Value::value_type, std::remove_const_t<Value>>;
};
template <class Value>
concept IsTuple = requires { std::tuple_size<Value>::value; };

// The argument `visit` of a program's tessera_visit_tensors(). Visits the members that the program passes.
template <class Visitor>
struct Members {
  Visitor& visitor;
  template <class... Values>
  void operator()(Values&... members) const;
};
struct Ignore {
  void operator()(auto&) const {}
};

template <class Value>
concept IsTaught = requires(Value& value, Members<Ignore> visit) { tessera_visit_tensors(value, visit); };

// kHolds: a value may contain a tensor that can be replaced. kKnown: no part of the type is opaque.
template <class Value>
struct Traits;
template <class... Values>
struct Elements {
  static constexpr bool kHolds = (... || Traits<std::remove_reference_t<Values>>::kHolds);
  static constexpr bool kKnown = (... && Traits<std::remove_reference_t<Values>>::kKnown);
};
struct Opaque {
  static constexpr bool kHolds = false, kKnown = false;
};

// Calls act(element) for each element of the value. Returns Elements<types of the elements>, or Opaque.
template <class Value, class Act>
auto for_each_element(Value& value, Act act) {
  if constexpr (IsOptional<Value>) {
    if (value.has_value()) act(*value);
    return Elements<decltype(*value)>();
  } else if constexpr (IsOrderedDict<Value>) {
    for (auto& entry : value) act(entry.value());
    return Elements<decltype(value.begin()->value())>();
  } else if constexpr (IsMap<Value>) {
    for (auto& entry : value) act(entry.second);
    return Elements<decltype((value.begin()->second))>();
  } else if constexpr (IsPlain<Value>) {
    return Elements<>();
  } else if constexpr (IsRange<Value>) {
    for (auto& element : value) act(element);
    return Elements<decltype(*value.begin())>();
  } else if constexpr (IsTuple<Value>) {
    return std::apply([&](auto&... elements) { return (act(elements), ..., Elements<decltype(elements)...>()); },
                      value);
  } else {
    return Opaque();
  }
}

template <class Value>
struct Traits : decltype(for_each_element(std::declval<Value&>(), Ignore())){};
template <IsTensor Value>
struct Traits<Value> {
  static constexpr bool kHolds = !std::is_const_v<Value>, kKnown = true;
};
template <IsTaught Value>
struct Traits<Value> {
  static constexpr bool kHolds = true, kKnown = true;
};

template <class Value, class Visitor>
void look_into(Value& value, Visitor& visitor) {
  if constexpr (IsTensor<Value>) {
    if constexpr (std::invocable<Visitor&, Value&>) visitor(value);  // else skips a const tensor
  } else if constexpr (IsTaught<Value>) {
    tessera_visit_tensors(value, Members<Visitor>{visitor});
  } else {
    for_each_element(value, [&](auto& element) { look_into(element, visitor); });
  }
}

template <class Visitor>
template <class... Values>
void Members<Visitor>::operator()(Values&... members) const {
  (look_into(members, visitor), ...);
}

}  // namespace internal

// Whether a value of this type may contain tensors that visit_tensors() can replace.
template <class Value>
constexpr bool kHoldsTensors = internal::Traits<std::decay_t<Value>>::kHolds;

// Whether visit_tensors() finds every tensor in a value of this type. Numbers, enums and strings contain none.
template <class Value>
constexpr bool kKnowsTensorsOf = internal::Traits<std::decay_t<Value>>::kKnown;

// Calls visit(at::Tensor&) for each tensor in `value`, defined or not, in order. For tensors that cannot be replaced
// (in a set, an at::TensorList, a const value), calls visit(const at::Tensor&) if `visit` accepts that type.
template <class Value, class Visit>
  requires std::invocable<Visit&, at::Tensor&>
void visit_tensors(Value& value, Visit&& visit) {
  internal::look_into(value, visit);
}

// Returns the defined tensors in `value`, in order.
template <class Value>
std::vector<at::Tensor> tensors_of(Value& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
  });
  return tensors;
}

}  // namespace tessera
