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

// An input or output of an exported Python module: a tensor, a number, a text, None, or a structure of these. Lists and
// tuples are sequences. Dictionaries, named tuples and result classes (transformers' ModelOutput) have named elements.
// Every wrapper and checkpointed() support this type (include/tessera/visit_tensors.h). Constructors are implicit, so
// that forward() accepts plain values. If a value is not of the kind that an accessor expects, the accessor throws
// std::invalid_argument with the actual kind.
class ExportedValue {
 public:
  ExportedValue() = default;                                      // makes None
  ExportedValue(std::nullopt_t) {}                                // NOLINT(google-explicit-constructor): for forward()
  ExportedValue(at::Tensor tensor);                               // NOLINT: for forward(); None if undefined
  ExportedValue(std::string text) : value_(std::move(text)) {}    // NOLINT(google-explicit-constructor): for forward()
  ExportedValue(const char* text) : value_(std::string(text)) {}  // NOLINT(google-explicit-constructor): for forward()
  ExportedValue(bool value) : value_(value) {}                    // NOLINT(google-explicit-constructor): for forward()
  template <std::integral Number>
    requires(!std::same_as<Number, bool>)
  ExportedValue(Number value) : value_(static_cast<int64_t>(value)) {}  // NOLINT(google-explicit-constructor): as above
  template <std::floating_point Number>
  ExportedValue(Number value) : value_(static_cast<double>(value)) {}  // NOLINT(google-explicit-constructor): as above
  ExportedValue(std::vector<ExportedValue> elements);                  // NOLINT(google-explicit-constructor): as above
  // Makes a sequence of the converted elements.
  template <class Value>
    requires std::convertible_to<Value, ExportedValue> && (!std::same_as<Value, ExportedValue>)
  ExportedValue(const std::vector<Value>& elements)  // NOLINT(google-explicit-constructor): for forward()
      : ExportedValue(std::vector<ExportedValue>(elements.begin(), elements.end())) {}
  // Makes None from an empty optional; otherwise converts the value.
  template <class Value>
    requires std::convertible_to<Value, ExportedValue>
  ExportedValue(const std::optional<Value>& value) {  // NOLINT(google-explicit-constructor): for forward()
    if (value) *this = ExportedValue(*value);
  }

  using Named = std::vector<std::pair<std::string, ExportedValue>>;  // a dict's elements, in order
  static ExportedValue dict(Named elements);                         // makes a dict

  bool is_none() const { return std::holds_alternative<std::monostate>(value_); }  // Python's None
  bool is_tensor() const { return std::holds_alternative<at::Tensor>(value_); }    // whether tensor() may be called
  bool is_bool() const { return std::holds_alternative<bool>(value_); }            // whether to_bool() may be called
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }          // an integer, not a bool
  bool is_double() const { return std::holds_alternative<double>(value_); }        // a double, not an integer
  bool is_text() const { return std::holds_alternative<std::string>(value_); }     // whether text() may be called
  bool is_sequence() const { return std::holds_alternative<Elements>(value_); }    // a list or a tuple
  bool is_dict() const { return std::holds_alternative<Named>(value_); }           // a value with named elements

  const at::Tensor& tensor() const;  // throws unless is_tensor()
  bool to_bool() const;              // throws unless is_bool()
  int64_t to_int() const;            // throws unless is_int()
  double to_double() const;          // throws unless is_double() or is_int(); converts an integer
  const std::string& text() const;   // throws unless is_text()

  size_t size() const;  // number of elements of a structure
  // Returns an element of a structure by position (in a dict, in its order) or by name.
  const ExportedValue& operator[](size_t index) const;
  const ExportedValue& operator[](int index) const { return (*this)[static_cast<size_t>(index)]; }
  const ExportedValue& operator[](const std::string& name) const;
  const ExportedValue& operator[](const char* name) const { return (*this)[std::string(name)]; }
  bool has(const std::string& name) const;  // whether a dict has this name
  const Named& items() const;               // the elements of a dict; throws unless is_dict()

  // Returns a description for messages: "a tensor", "None", "a dict of 'loss', 'logits'".
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

// Inputs of a module by their Python names: model->forward(NamedInputs{{"input_ids", ids}, {"labels", labels}}).
// Positional inputs may precede the NamedInputs.
class NamedInputs {
 public:
  NamedInputs() = default;
  // Stores the inputs in this order; add() appends another input.
  NamedInputs(std::initializer_list<std::pair<std::string, ExportedValue>> inputs) : inputs_(inputs) {}
  // Appends an input.
  void add(std::string name, ExportedValue value) { inputs_.emplace_back(std::move(name), std::move(value)); }
  const ExportedValue::Named& inputs() const { return inputs_; }  // in the given order

  template <class Visit>
  friend void tessera_visit_tensors(NamedInputs& named, Visit&& visit) {
    visit(named.inputs_);
  }

 private:
  ExportedValue::Named inputs_;
};

// Inputs of one call, by position and by name.
struct ExportedInputs {
  std::vector<ExportedValue> positional{};
  ExportedValue::Named named{};

  void add(ExportedValue value) { positional.push_back(std::move(value)); }  // adds a positional input
  // Adds named inputs.
  void add(const NamedInputs& inputs) { named.insert(named.end(), inputs.inputs().begin(), inputs.inputs().end()); }
};

}  // namespace tessera
