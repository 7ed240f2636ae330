#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// safetensors' names of dtypes: "F32", "BF16", "I64", "BOOL", ...; nothing for one it has no name for.
std::optional<std::string> safetensors_name(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_of(std::string_view safetensors_name);

// The bytes of a tensor of these sizes; nothing if that is 2^62 or more.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype);

}  // namespace tessera
