#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// What Python gives to a module and gets from it: a tensor, a number, a text, None, or a structure of these. Lists and
// tuples are sequences; dictionaries, named tuples and classes of results (transformers' ModelOutput) have names for
// their elements. Tensors in it are found by include/tessera/visit_tensors.h, so that it may go through every wrapper
// and through checkpointed(). Accessors throw std::invalid_argument if the value is of another kind, and say of which.
class ExportedValue {
 public:
  ExportedValue() = default;                                      // None
  ExportedValue(std::nullopt_t) {}                                // NOLINT(google-explicit-constructor)
  ExportedValue(at::Tensor tensor);                               // NOLINT: None if undefined
  ExportedValue(std::string text) : value_(std::move(text)) {}    // NOLINT(google-explicit-constructor)
  ExportedValue(const char* text) : value_(std::string(text)) {}  // NOLINT(google-explicit-constructor)
  ExportedValue(bool value) : value_(value) {}                    // NOLINT(google-explicit-constructor)
  template <std::integral Number>
    requires(!std::same_as<Number, bool>)
  ExportedValue(Number value) : value_(static_cast<int64_t>(value)) {}  // NOLINT(google-explicit-constructor)
  template <std::floating_point Number>
  ExportedValue(Number value) : value_(static_cast<double>(value)) {}  // NOLINT(google-explicit-constructor)
  ExportedValue(std::vector<ExportedValue> elements);                  // NOLINT(google-explicit-constructor)
  // A sequence of what the elements become.
  template <class Value>
    requires std::convertible_to<Value, ExportedValue> && (!std::same_as<Value, ExportedValue>)
  ExportedValue(const std::vector<Value>& elements)  // NOLINT(google-explicit-constructor)
      : ExportedValue(std::vector<ExportedValue>(elements.begin(), elements.end())) {}
  // None without a value.
  template <class Value>
    requires std::convertible_to<Value, ExportedValue>
  ExportedValue(const std::optional<Value>& value) {  // NOLINT(google-explicit-constructor)
    if (value) *this = ExportedValue(*value);
  }

  using Named = std::vector<std::pair<std::string, ExportedValue>>;  // a dict's elements, in its order
  static ExportedValue dict(Named elements);                         // of these, in this order

  bool is_none() const { return std::holds_alternative<std::monostate>(value_); }  // Python's None
  bool is_tensor() const { return std::holds_alternative<at::Tensor>(value_); }    // see tensor()
  bool is_bool() const { return std::holds_alternative<bool>(value_); }            // see to_bool()
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }          // see to_int(); not a bool
  bool is_double() const { return std::holds_alternative<double>(value_); }        // see to_double(); no integer
  bool is_text() const { return std::holds_alternative<std::string>(value_); }     // see text()
  bool is_sequence() const { return std::holds_alternative<Elements>(value_); }    // a list or a tuple
  bool is_dict() const { return std::holds_alternative<Named>(value_); }           // whatever has names

  const at::Tensor& tensor() const;  // the value's own
  bool to_bool() const;              // of nothing else
  int64_t to_int() const;            // of nothing else
  double to_double() const;          // of an integer too
  const std::string& text() const;   // the value's own

  size_t size() const;  // of structures: how many elements
  // An element of a structure by position (of a dict too, in its order) or by name.
  const ExportedValue& operator[](size_t index) const;
  const ExportedValue& operator[](int index) const { return (*this)[static_cast<size_t>(index)]; }
  const ExportedValue& operator[](const std::string& name) const;
  const ExportedValue& operator[](const char* name) const { return (*this)[std::string(name)]; }
  bool has(const std::string& name) const;  // of a dict: whether an element is called so
  const Named& items() const;               // of a dict

  // "a tensor", "None", "a dict of 'loss', 'logits'": for messages.
  std::string kind() const;

  template <class Visit>
  friend void tessera_visit_tensors(ExportedValue& value, Visit&& visit) {
    if (auto* tensor = std::get_if<at::Tensor>(&value.value_)) visit(*tensor);
    if (auto* elements = std::get_if<Elements>(&value.value_)) visit(*elements);
    if (auto* named = std::get_if<Named>(&value.value_)) visit(*named);
  }

 private:
  using Elements = std::vector<ExportedValue>;
  std::variant<std::monostate, at::Tensor, bool, int64_t, double, std::string, Elements, Named> value_;
};

// Inputs of a module by their names in Python: model->forward(NamedInputs{{"input_ids", ids}, {"labels", labels}}).
// May follow inputs by position.
class NamedInputs {
 public:
  NamedInputs() = default;
  // As above.
  NamedInputs(std::initializer_list<std::pair<std::string, ExportedValue>> inputs) : inputs_(inputs) {}
  // One more.
  void add(std::string name, ExportedValue value) { inputs_.emplace_back(std::move(name), std::move(value)); }
  const ExportedValue::Named& inputs() const { return inputs_; }  // as they were given

  template <class Visit>
  friend void tessera_visit_tensors(NamedInputs& named, Visit&& visit) {
    visit(named.inputs_);
  }

 private:
  ExportedValue::Named inputs_;
};

// Inputs of one call, by position and by name.
struct ExportedInputs {
  std::vector<ExportedValue> positional;
  ExportedValue::Named named;

  // One more by position.
  void add(ExportedValue value) { positional.push_back(std::move(value)); }
  // More by name.
  void add(const NamedInputs& inputs) { named.insert(named.end(), inputs.inputs().begin(), inputs.inputs().end()); }
};

}  // namespace tessera
