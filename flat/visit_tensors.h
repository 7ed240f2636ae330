#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

namespace visit_tensors_detail {

template <class Value>
struct Elements {  // a type in which no tensors are looked for
  static constexpr bool kAny = false;
  template <class Visit>
  static void visit(Value&, Visit&) {}
};

template <>
struct Elements<at::Tensor> {
  static constexpr bool kAny = true;
  template <class Visit>
  static void visit(at::Tensor& tensor, Visit& visitor) {
    visitor(tensor);
  }
};

template <class Range, class Value>
struct RangeElements {
  static constexpr bool kAny = Elements<Value>::kAny;
  template <class Visit>
  static void visit(Range& range, Visit& visitor) {
    if constexpr (kAny)
      for (Value& value : range) Elements<Value>::visit(value, visitor);
  }
};
template <class Value>
struct Elements<std::vector<Value>> : RangeElements<std::vector<Value>, Value> {};
template <class Value, size_t kCount>
struct Elements<std::array<Value, kCount>> : RangeElements<std::array<Value, kCount>, Value> {};
template <class Value>
struct Elements<std::optional<Value>> {
  static constexpr bool kAny = Elements<Value>::kAny;
  template <class Visit>
  static void visit(std::optional<Value>& value, Visit& visitor) {
    if (value) Elements<Value>::visit(*value, visitor);
  }
};
template <class Key, class Value>
struct Elements<std::map<Key, Value>> {
  static constexpr bool kAny = Elements<Value>::kAny;
  template <class Visit>
  static void visit(std::map<Key, Value>& map, Visit& visitor) {
    for (auto& entry : map) Elements<Value>::visit(entry.second, visitor);
  }
};

template <class Tuple, class... Values>
struct TupleElements {
  static constexpr bool kAny = (... || Elements<std::decay_t<Values>>::kAny);
  template <class Visit>
  static void visit(Tuple& tuple, Visit& visitor) {
    std::apply([&](auto&... values) { (Elements<std::decay_t<decltype(values)>>::visit(values, visitor), ...); },
               tuple);
  }
};
template <class... Values>
struct Elements<std::tuple<Values...>> : TupleElements<std::tuple<Values...>, Values...> {};
template <class First, class Second>
struct Elements<std::pair<First, Second>> : TupleElements<std::pair<First, Second>, First, Second> {};

}  // namespace visit_tensors_detail

// Whether visit_tensors() would look for tensors in a value of this type: a tensor, or vectors,
// arrays, tuples, pairs, optionals and maps of such. What else a program passes around is opaque.
template <class Value>
constexpr bool kHoldsTensors = visit_tensors_detail::Elements<std::decay_t<Value>>::kAny;

// Calls visit(at::Tensor&) for each tensor in `value`, in order, undefined ones too.
template <class Value, class Visit>
void visit_tensors(Value& value, Visit&& visit) {
  visit_tensors_detail::Elements<Value>::visit(value, visit);
}

}  // namespace tessera
