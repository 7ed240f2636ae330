#include <tessera/exported/value.h>

#include <algorithm>
#include <stdexcept>

namespace tessera {
namespace {

[[noreturn]] void refuse_value(const ExportedValue& value, const std::string& expected) {
  throw std::invalid_argument("ExportedValue: is " + value.kind() + ", expected " + expected);
}

}  // namespace

ExportedValue::ExportedValue(at::Tensor tensor) {
  if (tensor.defined()) value_ = std::move(tensor);
}

ExportedValue::ExportedValue(std::vector<ExportedValue> elements) : value_(std::move(elements)) {}

ExportedValue ExportedValue::dict(Named elements) {
  ExportedValue value;
  value.value_ = std::move(elements);
  return value;
}

const at::Tensor& ExportedValue::tensor() const {
  if (!is_tensor()) refuse_value(*this, "a tensor");
  return std::get<at::Tensor>(value_);
}

bool ExportedValue::to_bool() const {
  if (!is_bool()) refuse_value(*this, "a bool");
  return std::get<bool>(value_);
}

int64_t ExportedValue::to_int() const {
  if (!is_int()) refuse_value(*this, "an integer");
  return std::get<int64_t>(value_);
}

double ExportedValue::to_double() const {
  if (is_int()) return static_cast<double>(std::get<int64_t>(value_));
  if (!is_double()) refuse_value(*this, "a number");
  return std::get<double>(value_);
}

const std::string& ExportedValue::text() const {
  if (!is_text()) refuse_value(*this, "a text");
  return std::get<std::string>(value_);
}

size_t ExportedValue::size() const {
  if (is_dict()) return std::get<Named>(value_).size();
  if (!is_sequence()) refuse_value(*this, "a structure");
  return std::get<Elements>(value_).size();
}

const ExportedValue& ExportedValue::operator[](size_t index) const {
  if (index >= size()) refuse_value(*this, "one with element " + std::to_string(index));
  return is_dict() ? std::get<Named>(value_)[index].second : std::get<Elements>(value_)[index];
}

const ExportedValue& ExportedValue::operator[](const std::string& name) const {
  for (const auto& [own, element] : items())
    if (own == name) return element;
  refuse_value(*this, "one with '" + name + "'");
}

bool ExportedValue::has(const std::string& name) const {
  const Named& own = items();
  return std::ranges::any_of(own, [&](const auto& item) { return item.first == name; });
}

const ExportedValue::Named& ExportedValue::items() const {
  if (!is_dict()) refuse_value(*this, "a dict");
  return std::get<Named>(value_);
}

std::string ExportedValue::kind() const {
  if (is_none()) return "None";
  if (is_tensor()) return "a tensor";
  if (is_bool()) return "a bool";
  if (is_int()) return "an integer";
  if (is_double()) return "a float";
  if (is_text()) return "a text";
  if (is_sequence()) return "a sequence of " + std::to_string(size());
  std::string names;
  for (const auto& [name, element] : std::get<Named>(value_)) names += (names.empty() ? "'" : ", '") + name + "'";
  return names.empty() ? "an empty dict" : "a dict of " + names;
}

}  // namespace tessera
