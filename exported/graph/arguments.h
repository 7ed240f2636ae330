#pragma once

#include <ATen/core/jit_type.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exported/graph/graph.h"

namespace tessera::internal {

// Which slot has a value of this name; throws ExportedError if there is none.
using FindSlot = std::function<int(const std::string& name)>;

// An argument of a node, for an operator that takes it as `type`: numbers become floats or tensors, single numbers
// lists, as Python's binding of libtorch makes them. length: of a list that a single number is repeated for ("int[2]").
// Throws ExportedError for kinds that the schema of torch.export has and operators do not take, and for what is of
// another type.
Operand read_argument(const nlohmann::json& argument, const c10::TypePtr& type, int length, const FindSlot& find_slot);

// An argument of no declared type: of a higher-order operator, an arithmetic one, or an output.
Operand read_argument(const nlohmann::json& argument, const FindSlot& find_slot);

// The same where several may come as one list: (x, y) among a higher-order operator's arguments.
std::vector<Operand> read_arguments(const nlohmann::json& argument, const FindSlot& find_slot);

// The name of a tensor or number that a node or an input makes; "" for a constant.
std::string name_of_value(const nlohmann::json& argument);

}  // namespace tessera::internal
