#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <string_view>
#include <tuple>
#include <type_traits>

// What visit_tensors() knows of a type: by what it offers, not by its name, so that a program's own containers count.
namespace tessera::internal {

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
// Has no tensors in it, certainly.
template <class Value>
concept IsPlain = IsNumber<Value> || std::convertible_to<const Value&, std::string_view> ||
                  requires { requires IsNumber<typename Value::value_type>; };
// Of elements that are what it says: not of proxies, and not of its own kind, as JSON and file names are.
template <class Value>
concept IsRange = requires(Value& value) {
  value.begin() != value.end();
  requires std::is_lvalue_reference_v<decltype(*value.begin())>;
  requires std::same_as<std::remove_cvref_t<decltype(*value.begin())>, typename Value::value_type>;
  requires !std::same_as<typename Value::value_type, std::remove_const_t<Value>>;
};
template <class Value>
concept IsTuple = requires { std::tuple_size<Value>::value; };

}  // namespace tessera::internal
