#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// The tensors in what a program gives to a module and gets from it: casting inputs, calling again in backward,
// finding which parameters were used.
//
// Looked into are tensors, and what is made of them by vectors (any range), arrays, tuples, pairs, optionals, maps,
// unordered maps and torch::OrderedDict. A struct of the program's own is opaque until the program says, in the
// struct's namespace, which of its members to look into; several, and of any of these types:
//
//   struct Prediction { at::Tensor logits; std::vector<at::Tensor> states; int steps = 0; };
//   template <class Visit>
//   void tessera_visit_tensors(Prediction& value, Visit&& visit) { visit(value.logits, value.states); }
//
// It must be declared before the first use of the struct with Tessera. checkpointed() copies such a struct;
// FullyShardedDataParallel with MixedPrecision::cast_forward_inputs also makes one by default and assigns to it.
namespace tessera {

namespace visit_tensors_detail {

// What the program's function gives its members to.
template <class Visitor>
struct Members {
  Visitor& visitor;
  template <class... Values>
  void operator()(Values&... members) const;
};
struct AnyVisitor {
  void operator()(const at::Tensor&) const {}
};

template <class Value>
concept IsTensor = std::derived_from<std::remove_const_t<Value>, at::Tensor>;
template <class Value>
concept IsTaught = requires(Value& value, Members<AnyVisitor> visit) { tessera_visit_tensors(value, visit); };
template <class Value>
concept IsNumber = std::is_arithmetic_v<Value> || std::is_enum_v<Value>;
// Has no tensors in it, certainly.
template <class Value>
concept IsPlain = IsNumber<Value> || std::convertible_to<const Value&, std::string_view> || requires {
  requires IsNumber<typename Value::value_type> && !requires { typename Value::mapped_type; };
};
template <class Value>
concept IsOptional = !IsTaught<Value> && requires(Value& value) {
  value.has_value();
  *value;
};
template <class Value>
concept IsOrderedDict = !IsTaught<Value> && requires(Value& value) {
  value.begin()->key();
  value.begin()->value();
};
template <class Value>
concept IsMap = !IsTaught<Value> && requires(Value& value) {
  typename Value::mapped_type;
  value.begin()->second;
};
// Of elements that are what it says: not of proxies, and not of its own kind, as JSON and file names are.
template <class Value>
concept IsRange =
    !IsTaught<Value> && !IsPlain<Value> && !IsMap<Value> && !IsOrderedDict<Value> && requires(Value& value) {
      { *value.begin() } -> std::same_as<typename Value::value_type&>;
      value.begin() != value.end();
    } && !std::same_as<typename Value::value_type, std::remove_const_t<Value>>;
template <class Value>
concept IsConstRange =
    !IsTaught<Value> && !IsPlain<Value> && !IsMap<Value> && !IsOrderedDict<Value> && requires(Value& value) {
      { *value.begin() } -> std::same_as<const typename Value::value_type&>;
      value.begin() != value.end();
    } && !std::same_as<typename Value::value_type, std::remove_const_t<Value>>;
template <class Value>
concept IsTuple =
    !IsTaught<Value> && !IsRange<Value> && !IsConstRange<Value> && requires { std::tuple_size<Value>::value; };

// kHolds: somewhere in it may be a tensor that can be exchanged. kKnown: all that may be in it is looked into.
template <class Value>
struct Elements {  // opaque
  static constexpr bool kHolds = false, kKnown = IsPlain<Value>;
  template <class Visitor>
  static void visit(Value&, Visitor&) {}
};

template <class... Values>
struct ElementsOf {
  static constexpr bool kHolds = (... || Elements<std::remove_reference_t<Values>>::kHolds);
  static constexpr bool kKnown = (... && Elements<std::remove_reference_t<Values>>::kKnown);

 protected:
  template <class Value, class Visitor>
  static void visit_one(Value& value, Visitor& visitor) {
    Elements<Value>::visit(value, visitor);
  }
};

template <IsTensor Value>
struct Elements<Value> {
  static constexpr bool kHolds = !std::is_const_v<Value>, kKnown = true;
  template <class Visitor>
  static void visit(Value& tensor, Visitor& visitor) {
    if constexpr (std::invocable<Visitor&, Value&>) visitor(tensor);  // else it is one that cannot be exchanged
  }
};

template <IsTaught Value>
struct Elements<Value> {
  static constexpr bool kHolds = true, kKnown = true;
  template <class Visitor>
  static void visit(Value& value, Visitor& visitor) {
    tessera_visit_tensors(value, Members<Visitor>{visitor});
  }
};

template <IsOptional Value>
struct Elements<Value> : ElementsOf<decltype(*std::declval<Value&>())> {
  template <class Visitor>
  static void visit(Value& value, Visitor& visitor) {
    if (value.has_value()) Elements::visit_one(*value, visitor);
  }
};

template <IsOrderedDict Value>
struct Elements<Value> : ElementsOf<decltype(std::declval<Value&>().begin()->value())> {
  template <class Visitor>
  static void visit(Value& value, Visitor& visitor) {
    for (auto& entry : value) Elements::visit_one(entry.value(), visitor);
  }
};

template <IsMap Value>
struct Elements<Value> : ElementsOf<decltype((std::declval<Value&>().begin()->second))> {
  template <class Visitor>
  static void visit(Value& value, Visitor& visitor) {
    for (auto& entry : value) Elements::visit_one(entry.second, visitor);
  }
};

template <class Value>
  requires IsRange<Value> || IsConstRange<Value>
struct Elements<Value> : ElementsOf<decltype(*std::declval<Value&>().begin())> {
  template <class Visitor>
  static void visit(Value& value, Visitor& visitor) {
    for (auto& element : value) Elements::visit_one(element, visitor);
  }
};

template <class Value, class Positions = std::make_index_sequence<std::tuple_size_v<Value>>>
struct TupleElements;
template <class Value, size_t... kPositions>
struct TupleElements<Value, std::index_sequence<kPositions...>>
    : ElementsOf<std::tuple_element_t<kPositions, Value>...> {};
template <IsTuple Value>
struct Elements<Value> : TupleElements<Value> {
  template <class Visitor>
  static void visit(Value& value, Visitor& visitor) {
    std::apply([&](auto&... elements) { (Elements::visit_one(elements, visitor), ...); }, value);
  }
};

template <class Visitor>
template <class... Values>
void Members<Visitor>::operator()(Values&... members) const {
  (Elements<Values>::visit(members, visitor), ...);
}

}  // namespace visit_tensors_detail

// Whether visit_tensors() would look for tensors in a value of this type.
template <class Value>
constexpr bool kHoldsTensors = visit_tensors_detail::Elements<std::decay_t<Value>>::kHolds;

// Whether it would miss none: nothing in the type is opaque. (Numbers, enums and strings have no tensors.)
template <class Value>
constexpr bool kKnowsTensorsOf = visit_tensors_detail::Elements<std::decay_t<Value>>::kKnown;

// Calls visit(at::Tensor&) for each tensor in `value`, in order, undefined ones too; visit(const at::Tensor&), where
// it takes that, for those that cannot be exchanged (in a set, an at::TensorList, a const value).
template <class Value, class Visit>
  requires std::invocable<Visit&, at::Tensor&>
void visit_tensors(Value& value, Visit&& visit) {
  visit_tensors_detail::Elements<Value>::visit(value, visit);
}

// The defined ones.
template <class Value>
std::vector<at::Tensor> tensors_of(Value& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
  });
  return tensors;
}

}  // namespace tessera
