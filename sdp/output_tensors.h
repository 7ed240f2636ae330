#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

namespace tessera {

// Appends the tensors in what a module's forward() returned: a tensor, or optionals, pairs, tuples,
// arrays, vectors and maps of what has tensors in it. Returns false, at compile time, for a type
// that it cannot look into.
template <class Output>
constexpr bool collect_tensors(const Output& output, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_base_of_v<at::Tensor, Output>) {
    if (output.defined()) tensors.push_back(output);
    return true;
  } else if constexpr (std::is_arithmetic_v<Output> || std::is_enum_v<Output>) {
    return true;
  } else if constexpr (requires {
                         output.has_value();
                         *output;
                       }) {
    return !output.has_value() || collect_tensors(*output, tensors);
  } else if constexpr (requires { std::tuple_size<Output>::value; }) {
    return std::apply([&](const auto&... element) { return (... & collect_tensors(element, tensors)); }, output);
  } else if constexpr (requires {
                         output.begin()->key();
                         output.begin()->value();
                       }) {  // torch::OrderedDict
    bool known = true;
    for (const auto& entry : output) known = collect_tensors(entry.value(), tensors) && known;
    return known;
  } else if constexpr (requires { typename Output::mapped_type; }) {
    bool known = true;
    for (const auto& entry : output) known = collect_tensors(entry.second, tensors) && known;
    return known;
  } else if constexpr (requires {
                         typename Output::value_type;
                         output.begin() != output.end();
                       }) {
    bool known = true;
    for (const auto& element : output) known = collect_tensors(element, tensors) && known;
    return known;
  } else {
    return false;
  }
}

}  // namespace tessera
