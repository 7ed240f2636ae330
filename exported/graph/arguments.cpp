#include "exported/graph/arguments.h"

#include <algorithm>
#include <utility>

#include <tessera/errors.h>
#include "exported/archive/fields.h"

namespace tessera::internal {
namespace {

using c10::TypeKind;
using nlohmann::json;

TypeKind kind_of(const c10::TypePtr& type) { return type->kind(); }

c10::TypePtr without_optional(const c10::TypePtr& type) {
  return type && kind_of(type) == TypeKind::OptionalType ? type->castRaw<c10::OptionalType>()->getElementType() : type;
}

bool is_list(const c10::TypePtr& type) { return type && kind_of(type) == TypeKind::ListType; }

c10::TypePtr element_type(const c10::TypePtr& list) {
  return is_list(list) ? list->castRaw<c10::ListType>()->getElementType() : nullptr;
}

bool is_kind(const c10::TypePtr& type, TypeKind kind) { return type && kind_of(type) == kind; }
// Returns whether the type is int or SymInt. Operator schemas use either type for an integer parameter.
bool is_int(const c10::TypePtr& type) {
  return is_kind(type, TypeKind::IntType) || is_kind(type, TypeKind::SymIntType);
}
bool is_float(const c10::TypePtr& type) {
  return is_kind(type, TypeKind::FloatType) || is_kind(type, TypeKind::SymFloatType);
}

[[noreturn]] void refuse_argument(const std::string& what, const c10::TypePtr& type) {
  throw ExportedError("an argument is " + what + (type ? ", expected " + type->str() : ""));
}

// A number that is either the value of a slot ({"as_name": "s0"}) or a constant ({"as_int": 3}).
struct Symbolic {
  int slot = kNoSlot;
  c10::IValue constant;
};
Symbolic read_symbolic(const json& value, const FindSlot& find_slot) {
  const auto [kind, inner] = alternative_of(value);
  if (kind == "as_name") return {find_slot(text_of(inner)), {}};
  if (kind == "as_int") return {kNoSlot, int_of(inner)};
  if (kind == "as_float") return {kNoSlot, double_of(inner)};
  if (kind == "as_bool") return {kNoSlot, bool_of(inner)};
  throw ExportedError("a number is of the unknown kind '" + kind + "'");
}

Operand number_operand(const Symbolic& number, const c10::TypePtr& type, int length);

// Returns a list of `length` copies of a number, for a parameter of a list type. Clamps `length` to the range 1 to 8.
Operand repeated(const Symbolic& number, const c10::TypePtr& type, int length) {
  const auto kind = is_int(element_type(type))     ? Operand::Kind::kInts
                    : is_float(element_type(type)) ? Operand::Kind::kFloats
                                                   : Operand::Kind::kBools;
  const size_t count = static_cast<size_t>(std::clamp(length, 1, 8));
  return Operand::list(kind, std::vector<int>(count, number.slot), std::vector<c10::IValue>(count, number.constant));
}

Operand number_operand(const Symbolic& number, const c10::TypePtr& type, int length) {
  if (is_list(type)) return repeated(number, type, length);
  if (number.slot != kNoSlot) {
    if (is_kind(type, TypeKind::TensorType)) return Operand::slot(number.slot, Operand::Kind::kWrappedNumber);
    if (is_float(type)) return Operand::slot(number.slot, Operand::Kind::kFloat);
    return Operand::slot(number.slot);
  }
  const c10::IValue& value = number.constant;
  if (is_kind(type, TypeKind::TensorType)) return Operand::constant(wrapped_number(value));
  if (is_float(type) && !value.isComplexDouble()) return Operand::constant(value.toScalar().toDouble());
  if (is_int(type) && value.isBool()) return Operand::constant(int64_t{value.toBool()});
  const bool fits = !type || is_kind(type, TypeKind::NumberType) || (is_int(type) && value.isInt()) ||
                    ((is_kind(type, TypeKind::BoolType) || is_kind(type, TypeKind::SymBoolType)) && value.isBool());
  if (!fits) refuse_argument("a number", type);
  return Operand::constant(value);
}

Operand::Kind list_kind(const std::vector<Symbolic>& numbers, const c10::TypePtr& type) {
  const c10::TypePtr element = element_type(type);
  if (is_int(element)) return Operand::Kind::kInts;
  if (is_float(element)) return Operand::Kind::kFloats;
  if (is_kind(element, TypeKind::BoolType)) return Operand::Kind::kBools;
  if (type && !(is_kind(element, TypeKind::TensorType) && numbers.empty())) refuse_argument("a list of numbers", type);
  return Operand::Kind::kInts;
}

Operand number_list(const std::vector<Symbolic>& numbers, const c10::TypePtr& type, Operand::Kind without_type) {
  const Operand::Kind kind = type ? list_kind(numbers, type) : without_type;
  std::vector<int> slots;
  std::vector<c10::IValue> constants;
  for (const Symbolic& number : numbers) {
    c10::IValue constant = number.constant;
    if (kind == Operand::Kind::kInts && constant.isBool()) constant = int64_t{constant.toBool()};
    const bool fits = number.slot != kNoSlot || kind == Operand::Kind::kFloats ||
                      (kind == Operand::Kind::kInts ? constant.isInt() : constant.isBool());
    if (!fits) refuse_argument("a list of numbers of another kind", type);
    slots.push_back(number.slot);
    constants.push_back(std::move(constant));
  }
  Operand list = Operand::list(kind, std::move(slots), std::move(constants));
  const bool is_constant = std::ranges::all_of(list.slots(), [](int slot) { return slot == kNoSlot; });
  if (!is_constant) return list;
  const std::shared_ptr<const Execution> nothing;
  Frame frame{{}, nothing};
  return Operand::constant(list.get(frame));
}

std::vector<Symbolic> read_numbers(const json& list, const std::string& kind, const FindSlot& find_slot) {
  if (!list.is_array()) throw ExportedError("a list was expected");
  std::vector<Symbolic> numbers;
  for (const json& element : list) {
    if (kind == "as_ints") numbers.push_back({kNoSlot, int_of(element)});
    if (kind == "as_floats") numbers.push_back({kNoSlot, double_of(element)});
    if (kind == "as_bools") numbers.push_back({kNoSlot, bool_of(element)});
    if (kind.starts_with("as_sym_")) numbers.push_back(read_symbolic(element, find_slot));
  }
  return numbers;
}

// Reads an optional tensor. Returns the slot of {"as_tensor": {"name": ...}}, and kNoSlot for {"as_none": true}.
int optional_tensor(const json& value, const FindSlot& find_slot) {
  const auto [kind, inner] = alternative_of(value);
  if (kind == "as_none") return kNoSlot;
  if (kind == "as_tensor") return find_slot(text_field(inner, "name"));
  throw ExportedError("an optional tensor is of the unknown kind '" + kind + "'");
}

Operand tensor_list(const json& list, bool are_optional, const c10::TypePtr& type, const FindSlot& find_slot) {
  if (!list.is_array()) throw ExportedError("a list was expected");
  const c10::TypePtr element = element_type(type);
  if (list.empty() && type && !is_kind(without_optional(element), TypeKind::TensorType))
    return number_list({}, type, Operand::Kind::kInts);
  if (type && !is_kind(without_optional(element), TypeKind::TensorType)) refuse_argument("a list of tensors", type);
  std::vector<int> slots;
  for (const json& tensor : list)
    slots.push_back(are_optional ? optional_tensor(tensor, find_slot) : find_slot(text_field(tensor, "name")));
  const bool takes_optional = type ? is_kind(element, TypeKind::OptionalType) : are_optional;
  if (!takes_optional && std::ranges::find(slots, kNoSlot) != slots.end()) refuse_argument("a list with None", type);
  std::vector<c10::IValue> constants(slots.size());
  return Operand::list(takes_optional ? Operand::Kind::kOptionalTensors : Operand::Kind::kTensors, std::move(slots),
                       std::move(constants));
}

Operand read_device(const json& value) {
  if (text_field(value, "type") == "meta") return Operand::constant(at::Device(at::kMeta));
  return Operand::device();
}

bool is_number(const std::string& kind) {
  return kind == "as_int" || kind == "as_float" || kind == "as_bool" || kind == "as_complex" || kind == "as_sym_int" ||
         kind == "as_sym_float" || kind == "as_sym_bool";
}

Symbolic read_number(const json& argument, const FindSlot& find_slot) {
  const auto [kind, value] = alternative_of(argument);
  if (kind == "as_complex")
    return {kNoSlot, c10::complex<double>(double_of(field(value, "real")), double_of(field(value, "imag")))};
  return read_symbolic(kind.starts_with("as_sym_") ? value : argument, find_slot);
}

Operand::Kind list_without_type(const std::string& kind) {
  if (kind == "as_floats" || kind == "as_sym_floats") return Operand::Kind::kFloats;
  return kind == "as_bools" || kind == "as_sym_bools" ? Operand::Kind::kBools : Operand::Kind::kInts;
}

Operand read_text(const json& value, const c10::TypePtr& type) {
  if (type && !is_kind(type, TypeKind::StringType)) refuse_argument("a text", type);
  return Operand::constant(text_of(value));
}

}  // namespace

Operand read_argument(const json& argument, const c10::TypePtr& declared, int length, const FindSlot& find_slot) {
  const auto [kind, value] = alternative_of(argument);
  const c10::TypePtr type = without_optional(declared);
  if (kind == "as_none") return Operand::constant({});
  if (kind == "as_tensor") {
    if (is_list(type)) return tensor_list(json::array({value}), false, type, find_slot);
    return Operand::slot(find_slot(text_field(value, "name")));
  }
  if (kind == "as_optional_tensor") {
    const int slot = optional_tensor(value, find_slot);
    return slot == kNoSlot ? Operand::constant({}) : Operand::slot(slot);
  }
  if (is_number(kind)) return number_operand(read_number(argument, find_slot), type, length);
  if (kind == "as_ints" || kind == "as_floats" || kind == "as_bools" || kind == "as_sym_ints" ||
      kind == "as_sym_floats" || kind == "as_sym_bools")
    return number_list(read_numbers(value, kind, find_slot), type, list_without_type(kind));
  if (kind == "as_tensors" || kind == "as_optional_tensors")
    return tensor_list(value, kind == "as_optional_tensors", type, find_slot);
  if (kind == "as_string") return read_text(value, type);
  if (kind == "as_strings") return Operand::constant(texts_of(value));
  if (kind == "as_device") return read_device(value);
  // The remaining kinds are enumerations, whose values operators expect as integers.
  if (type && !is_int(type)) refuse_argument("of the kind '" + kind + "'", type);
  if (kind == "as_scalar_type") return Operand::constant(static_cast<int64_t>(dtype_of_export(value)));
  if (kind == "as_layout") return Operand::constant(layout_of_export(value));
  if (kind == "as_memory_format") return Operand::constant(memory_format_of_export(value));
  refuse_argument("of the kind '" + kind + "', which is not supported", type);
}

Operand read_argument(const json& argument, const FindSlot& find_slot) {
  return read_argument(argument, nullptr, 0, find_slot);
}

std::vector<Operand> read_arguments(const json& argument, const FindSlot& find_slot) {
  const auto [kind, value] = alternative_of(argument);
  std::vector<Operand> operands;
  if (kind == "as_tensors" || kind == "as_optional_tensors") {
    for (const json& tensor : value) {
      const int slot =
          kind == "as_tensors" ? find_slot(text_field(tensor, "name")) : optional_tensor(tensor, find_slot);
      operands.push_back(slot == kNoSlot ? Operand::constant({}) : Operand::slot(slot));
    }
  } else if (kind.ends_with("s") && kind != "as_strings") {
    for (const Symbolic& number : read_numbers(value, kind, find_slot))
      operands.push_back(number_operand(number, nullptr, 0));
  } else {
    operands.push_back(read_argument(argument, find_slot));
  }
  return operands;
}

std::string name_of_value(const json& argument) {
  const auto [kind, value] = alternative_of(argument);
  if (kind == "as_tensor") return text_field(value, "name");
  if (kind == "as_optional_tensor") return name_of_value(value);
  if (kind == "as_sym_int" || kind == "as_sym_float" || kind == "as_sym_bool") {
    const auto [inner_kind, inner] = alternative_of(value);
    return inner_kind == "as_name" ? text_of(inner) : "";
  }
  if (kind == "as_custom_obj")
    throw ExportedError("'" + text_field(value, "name") + "' is a custom object, which would have to be unpickled");
  static constexpr const char* kConstants[] = {"as_none", "as_int", "as_float", "as_bool", "as_string"};
  if (std::ranges::find(kConstants, kind) == std::end(kConstants))
    throw ExportedError("a value is of the kind '" + kind + "', which is not supported");
  return "";
}

}  // namespace tessera::internal
