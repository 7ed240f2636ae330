#include "tessera/checkpoint/dtype.h"

#include <utility>

namespace tessera {
namespace {

constexpr std::pair<const char*, at::ScalarType> kNames[] = {
    {"F64", at::kDouble},          {"F32", at::kFloat},        {"F16", at::kHalf},
    {"BF16", at::kBFloat16},       {"I64", at::kLong},         {"I32", at::kInt},
    {"I16", at::kShort},           {"I8", at::kChar},          {"U8", at::kByte},
    {"BOOL", at::kBool},           {"U16", at::kUInt16},       {"U32", at::kUInt32},
    {"U64", at::kUInt64},          {"C64", at::kComplexFloat}, {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
};

}  // namespace

std::optional<std::string> safetensors_name(at::ScalarType dtype) {
  for (const auto& [name, type] : kNames)
    if (type == dtype) return name;
  return std::nullopt;
}

std::optional<at::ScalarType> dtype_of(std::string_view safetensors_name) {
  for (const auto& [name, type] : kNames)
    if (safetensors_name == name) return type;
  return std::nullopt;
}

std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  constexpr int64_t kLimit = int64_t{1} << 62;
  for (const int64_t size : sizes)
    if (size == 0) return 0;
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    if (size > kLimit / bytes) return std::nullopt;
    bytes *= size;
  }
  return bytes;
}

}  // namespace tessera
