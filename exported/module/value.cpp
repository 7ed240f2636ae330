#include <tessera/exported/value.h>

#include <algorithm>
#include <stdexcept>

namespace tessera {
namespace {

[[noreturn]] void refuse_value(const ExportedValue& value, const std::string& expected) {
  throw std::invalid_argument("ExportedValue: is " + value.kind() + ", expected " + expected);
}

// Returns the T in `held`, the content of `value`. Throws if the content is of another kind.
template <class T>
const T& held_as(const ExportedValue& value, const auto& held, const char* expected) {
  const T* const content = std::get_if<T>(&held);
  if (content == nullptr) refuse_value(value, expected);
  return *content;
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

const at::Tensor& ExportedValue::tensor() const { return held_as<at::Tensor>(*this, value_, "a tensor"); }

bool ExportedValue::to_bool() const { return held_as<bool>(*this, value_, "a bool"); }

int64_t ExportedValue::to_int() const { return held_as<int64_t>(*this, value_, "an integer"); }

double ExportedValue::to_double() const {
  return is_int() ? static_cast<double>(to_int()) : held_as<double>(*this, value_, "a number");
}

const std::string& ExportedValue::text() const { return held_as<std::string>(*this, value_, "a text"); }

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

const ExportedValue::Named& ExportedValue::items() const { return held_as<Named>(*this, value_, "a dict"); }

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
