#pragma once

#include <ATen/core/jit_type.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exported/graph/graph.h"

namespace tessera::internal {

// Returns the slot of the value with this name; throws ExportedError if none exists.
using FindSlot = std::function<int(const std::string& name)>;

// Reads an argument of a node for an operator parameter of `type`. Converts as Python's binding of libtorch does:
// numbers to floats or tensors, a single number to a list of `length` ("int[2]"). Throws ExportedError for kinds that
// operators do not take, and for a wrong type.
Operand read_argument(const nlohmann::json& argument, const c10::TypePtr& type, int length, const FindSlot& find_slot);

// Reads an argument without a declared type: an argument of a higher-order operator or of arithmetic, or an output.
Operand read_argument(const nlohmann::json& argument, const FindSlot& find_slot);

// Like read_argument() without a type, but returns an operand for each element of a list, such as (x, y).
std::vector<Operand> read_arguments(const nlohmann::json& argument, const FindSlot& find_slot);

// Returns the name of the tensor or number that a node or input produces; "" for a constant, otherwise throws.
std::string name_of_value(const nlohmann::json& argument);

}  // namespace tessera::internal
