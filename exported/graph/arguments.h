#pragma once

#include <ATen/core/jit_type.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exported/graph/graph.h"

namespace tessera::internal {

// Returns the slot of the value with this name. Throws ExportedError if there is no such value.
using FindSlot = std::function<int(const std::string& name)>;

// Reads an argument of a node for an operator parameter of `type`. Converts arguments like libtorch's Python binding:
// numbers to floats or tensors, and a single number to a list of `length` numbers ("int[2]"). Throws ExportedError for
// an argument of an unsupported kind or a wrong type.
Operand read_argument(const nlohmann::json& argument, const c10::TypePtr& type, int length, const FindSlot& find_slot);

// Reads an argument without a declared type, such as a graph output or an argument of a higher-order operator.
Operand read_argument(const nlohmann::json& argument, const FindSlot& find_slot);

// Like read_argument() without a type. However, for a list such as (x, y), returns one operand for each element.
std::vector<Operand> read_arguments(const nlohmann::json& argument, const FindSlot& find_slot);

// Returns the name of a node's result or a graph's input, or "" for a constant. Throws ExportedError for other kinds.
std::string name_of_value(const nlohmann::json& argument);

}  // namespace tessera::internal
