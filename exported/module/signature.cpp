#include "exported/module/signature.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>

#include <tessera/errors.h>
#include "core/runtime/require.h"
#include "exported/archive/fields.h"
#include "exported/graph/arguments.h"

namespace tessera::internal {

using nlohmann::json;

// ---- reading ------------------------------------------------------------------------------------

namespace {

ExportedValue constant_value(const Alternative& alternative) {
  const auto& [kind, value] = alternative;
  if (kind == "as_none") return {};
  if (kind == "as_int") return int_of(value);
  if (kind == "as_float") return double_of(value);
  if (kind == "as_string") return text_of(value);
  if (kind == "as_bool") return bool_of(value);
  throw ExportedError("a constant input is of the unknown kind '" + kind + "'");
}

bool same_constant(const ExportedValue& a, const ExportedValue& b) {
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.is_text() || b.is_text()) return a.is_text() && b.is_text() && a.text() == b.text();
  if (a.is_bool() || b.is_bool()) return a.is_bool() && b.is_bool() && a.to_bool() == b.to_bool();
  const bool are_numbers = (a.is_int() || a.is_double()) && (b.is_int() || b.is_double());
  return are_numbers && a.to_double() == b.to_double();
}

std::string constant_text(const ExportedValue& value) {
  if (value.is_none()) return "None";
  if (value.is_text()) return "'" + value.text() + "'";
  if (value.is_bool()) return value.to_bool() ? "True" : "False";
  if (value.is_int()) return std::to_string(value.to_int());
  return value.is_double() ? c10::str(value.to_double()) : value.kind();
}

// Returns whether the dtype of an input is acceptable. Floating-point and complex types may differ in width from the
// export, for mixed precision. Integer types must match: a uint8 index is a mask, and shorter types may overflow.
bool may_stand_for(at::ScalarType given, at::ScalarType exported) {
  return given == exported || (at::isFloatingType(given) && at::isFloatingType(exported)) ||
         (at::isComplexType(given) && at::isComplexType(exported));
}

}  // namespace

// Parses a size: {"as_int": 4} or {"as_expr": {"expr_str": "Symbol('s0', ...)", "hint": {"as_int": 4}}}.
Expression InputSignature::read_size(const json& size) {
  const auto [kind, value] = alternative_of(size);
  if (kind == "as_int") return Expression::constant(int_of(value));
  if (kind != "as_expr") throw ExportedError("a size is of the unknown kind '" + kind + "'");
  Expression expression = Expression::parse(text_field(value, "expr_str"));
  const auto hint = value.find("hint");
  if (const auto symbol = expression.symbol(); symbol && hint != value.end() && hint->is_object()) {
    const auto [hint_kind, hinted] = alternative_of(*hint);
    if (hint_kind == "as_int") exported_with_[*symbol] = int_of(hinted);
  }
  return expression;
}

InputSignature::InputSignature(const json& program, const Structure::FieldNames& named_tuples,
                               const std::vector<std::string>& positional, bool may_leave_guards) {
  const json& graph_module = object_field(program, "graph_module");
  read_leaves(graph_module);
  read_ranges(field(program, "range_constraints"));
  const json& calls = list_field(graph_module, "module_call_graph");
  if (calls.empty()) throw ExportedError("the module's own call is missing");
  const size_t by_position = read_parameters(object_field(calls[0], "signature"), named_tuples);
  read_positions(by_position, positional);
  read_guards(program, may_leave_guards);
}

void InputSignature::read_leaves(const json& graph_module) {
  const json& graph = object_field(graph_module, "graph");
  for (const json& spec : list_field(object_field(graph_module, "signature"), "input_specs")) {
    const auto [kind, value] = alternative_of(spec);
    require<ExportedError>(kind != "token" && kind != "custom_obj", "an input is a ",
                           kind == "token" ? "token of an effect" : "custom object", ", which is not supported");
    Leaf leaf;
    if (kind == "constant_input") {
      leaf.constant = constant_value(alternative_of(field(value, "value")));
    } else if (kind == "user_input") {
      const json& argument = field(value, "arg");
      const std::string name = name_of_value(argument);
      const auto [argument_kind, inner] = alternative_of(argument);
      leaf.is_tensor = argument_kind == "as_tensor";
      if (leaf.is_tensor) {
        const json& meta = field(object_field(graph, "tensor_values"), name.c_str());
        leaf.dtype = dtype_of_export(field(meta, "dtype"));
        for (const json& size : list_field(meta, "sizes")) leaf.sizes.push_back(read_size(size));
      } else if (argument_kind == "as_sym_int" && !name.empty()) {
        leaf.number = read_size(field(object_field(graph, "sym_int_values"), name.c_str()));
      } else {
        leaf.constant = constant_value({argument_kind, inner});
      }
    } else {
      continue;
    }
    leaves_.push_back(std::move(leaf));
  }
}

void InputSignature::read_ranges(const json& range_constraints) {
  auto bound = [](const json& range, const char* name) -> std::optional<int64_t> {
    const json& value = field(range, name);
    return value.is_number_integer() ? std::optional(int_of(value)) : std::nullopt;
  };
  if (!range_constraints.is_object()) throw ExportedError("the ranges of symbols are not an object");
  for (const auto& [symbol, range] : range_constraints.items())
    ranges_[symbol] = {bound(range, "min_val"), bound(range, "max_val")};
}

// Reads the parameters. Returns the number of parameters that were passed by position during the export.
size_t InputSignature::read_parameters(const json& signature, const Structure::FieldNames& named_tuples) {
  const Structure whole = Structure::parse(text_field(signature, "in_spec"), named_tuples);
  if (whole.children().size() != 2 || whole.children()[0].is_leaf() || whole.children()[0].is_dict() ||
      whole.children()[1].is_leaf())
    throw ExportedError("the inputs are not (args, kwargs)");
  std::vector<std::string> names;
  if (const auto given = signature.find("forward_arg_names"); given != signature.end() && given->is_array())
    names = texts_of(*given);
  size_t next = 0;
  for (const Structure& half : whole.children()) {
    for (size_t i = 0; i < half.children().size(); ++i) {
      const Structure& own = half.children()[i];
      std::string name = "args[" + std::to_string(i) + "]";
      if (half.is_dict()) {
        name = half.names()[i];
      } else if (i < names.size()) {
        name = names[i];
      }
      parameters_.push_back({name, own, next, own.leaf_count()});
      std::vector<std::string> labels;
      own.name_leaves(name, labels);
      for (const std::string& label : labels) {
        if (next == leaves_.size()) throw ExportedError("the inputs' structure has more leaves than the graph");
        leaves_[next].name = label;
        leaves_[next++].label = "input '" + label + "'";
      }
    }
  }
  if (next != leaves_.size()) throw ExportedError("the inputs' structure has fewer leaves than the graph");
  return whole.children()[0].children().size();
}

void InputSignature::read_positions(size_t by_position, const std::vector<std::string>& positional) {
  for (size_t i = 0; i < by_position; ++i) positions_.push_back(i);
  for (size_t i = by_position; i < positional.size(); ++i) {
    const auto own = std::ranges::find(parameters_, positional[i], &Parameter::name);
    if (own == parameters_.end()) throw ExportedError("it has no input '" + positional[i] + "'");
    positions_.push_back(static_cast<size_t>(own - parameters_.begin()));
  }
}

void InputSignature::read_guards(const json& program, bool may_leave_guards) {
  if (!program.contains("guards_code")) return;
  for (const json& guard : list_field(program, "guards_code")) {
    try {
      guards_.push_back(Guard::parse(text_of(guard), [&](const std::string& label) { return input_labelled(label); }));
    } catch (const ExportedError& error) {
      require<ExportedError>(may_leave_guards, error.what(), "; ExportedOptions::unchecked goes without");
    }
  }
}

// Returns the index of the leaf for a guard's label, or nullopt. Elements of *args and **kwargs are separate inputs, so
// the leaf of "xs[0]" is "xs_0", and that of "kwargs['mask']" is "mask". A strict export uses numbers: "flat_args[2]".
std::optional<size_t> InputSignature::leaf_labelled(const std::string& label) const {
  const size_t open = label.find('['), close = label.find(']');
  std::vector<std::string> names{label};
  if (open != std::string::npos && close != std::string::npos && close > open + 1) {
    const std::string inside = label.substr(open + 1, close - open - 1), rest = label.substr(close + 1);
    names.push_back(inside.front() == '\'' && inside.size() > 2 ? inside.substr(1, inside.size() - 2) + rest
                                                                : label.substr(0, open) + "_" + inside + rest);
  }
  for (const std::string& name : names)
    for (size_t i = 0; i < leaves_.size(); ++i)
      if (leaves_[i].name == name) return i;
  for (size_t i = 0; i < leaves_.size(); ++i)
    if (label == "flat_args[" + std::to_string(i) + "]") return i;
  return std::nullopt;
}

std::optional<Guard::Input> InputSignature::input_labelled(const std::string& label) const {
  const auto i = leaf_labelled(label);
  if (!i) return std::nullopt;
  const Leaf& leaf = leaves_[*i];
  Guard::Input input{*i, {}, {}};
  if (leaf.is_tensor) input.dimensions = static_cast<int64_t>(leaf.sizes.size());
  if (leaf.constant && leaf.constant->is_bool()) input.constant = leaf.constant->to_bool();
  if (leaf.constant && leaf.constant->is_int()) input.constant = leaf.constant->to_int();
  if (leaf.constant && leaf.constant->is_double()) input.constant = leaf.constant->to_double();
  if (leaf.constant && !input.constant) return std::nullopt;  // the constant is None or a text, and not a number
  return input;
}

std::vector<std::string> InputSignature::names() const {
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters_) names.push_back(parameter.name);
  return names;
}

std::string InputSignature::describe() const {
  std::string text;
  for (const Leaf& leaf : leaves_) {
    text += leaf.label + ": ";
    if (leaf.constant) {
      text += constant_text(*leaf.constant) + ", fixed";
    } else if (leaf.number) {
      text += "integer " + leaf.number->to_string();
    } else {
      text += std::string(c10::toString(leaf.dtype)) + " [";
      for (size_t i = 0; i < leaf.sizes.size(); ++i) text += (i > 0 ? ", " : "") + leaf.sizes[i].to_string();
      text += "]";
    }
    text += "\n";
  }
  for (const auto& [symbol, range] : ranges_)
    text += symbol + ": from " + (range.least ? std::to_string(*range.least) : "any") + " to " +
            (range.most ? std::to_string(*range.most) : "any") + "\n";
  for (const Guard& guard : guards_) text += guard.text() + "\n";
  return text;
}

// ---- shapes -------------------------------------------------------------------------------------

// Computes the value of each symbol from the sizes of one call, and checks all sizes against these values.
class ShapeCheck {
 public:
  explicit ShapeCheck(const InputSignature& signature) : signature_(signature) {}

  void add(const std::string& label, const Expression& expected, int64_t value) {
    if (const auto symbol = expected.symbol()) {
      bind(*symbol, value, label);
    } else {
      derived_.push_back({label, &expected, value});
    }
  }

  // Checks the sizes whose expression is not a single symbol. Must be called after all sizes have been added.
  void finish() {
    for (const Derived& size : derived_) solve(size);
    for (const Derived& size : derived_) {
      const auto expected = size.expected->evaluate(symbols_);
      if (!expected || *expected == size.value) continue;
      std::string text =
          size.label + " is " + std::to_string(size.value) + ", exported as " + size.expected->to_string();
      if (!size.expected->symbols().empty()) text += " = " + std::to_string(*expected);
      throw std::invalid_argument(text);
    }
  }
  // Returns the values of the symbols. Must be called after finish().
  const Expression::Symbols& symbols() const { return symbols_; }

 private:
  struct Derived {
    std::string label;
    const Expression* expected;
    int64_t value;
  };

  void bind(const std::string& symbol, int64_t value, const std::string& label) {
    const int64_t known = symbols_.emplace(symbol, value).first->second;
    const std::string& first = labels_.emplace(symbol, label).first->second;
    require(known == value, label, " is ", value, ", but ", first, " is ", known,
            ": they were the same when the model was exported");
    const auto range = signature_.ranges_.find(symbol);
    if (range == signature_.ranges_.end()) return;
    const auto& [least, most] = range->second;
    if ((least && value < *least) || (most && value > *most))
      throw std::invalid_argument(label + " is " + std::to_string(value) + ", exported for " +
                                  (least ? std::to_string(*least) : "any") + " to " +
                                  (most ? std::to_string(*most) : "any"));
  }

  // If a size has one unknown symbol, solves this linear equation for it. Throws if there is no integer solution.
  void solve(const Derived& size) {
    std::optional<std::string> unknown;
    for (const std::string& symbol : size.expected->symbols()) {
      if (symbols_.contains(symbol)) continue;
      if (unknown) return;
      unknown = symbol;
    }
    if (!unknown) return;
    auto at = [&](int64_t value) {
      auto symbols = symbols_;
      symbols[*unknown] = value;
      return size.expected->evaluate(symbols);
    };
    const auto zero = at(0), one = at(1);
    if (!zero || !one || *zero == *one) return;
    int64_t slope = 0, rise = 0;
    if (__builtin_sub_overflow(*one, *zero, &slope) || __builtin_sub_overflow(size.value, *zero, &rise)) slope = 0;
    const auto value = floor_division(rise, slope);
    if (value && at(*value) == size.value) return bind(*unknown, *value, size.label);
    throw std::invalid_argument(size.label + " is " + std::to_string(size.value) + ", exported as " +
                                size.expected->to_string());
  }

  const InputSignature& signature_;
  Expression::Symbols symbols_;
  std::map<std::string, std::string> labels_;
  std::vector<Derived> derived_;
};

// ---- checks of one call -------------------------------------------------------------------------

size_t InputSignature::parameter_named(const std::string& name) const {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].name == name) return i;
  throw std::invalid_argument("there is no input '" + name + "'; the model was exported with " + known_parameters());
}

std::string InputSignature::known_parameters() const {
  std::string known;
  for (const Parameter& parameter : parameters_) known += (known.empty() ? "'" : ", '") + parameter.name + "'";
  return known;
}

std::vector<ExportedValue> InputSignature::gather(const ExportedInputs& inputs) const {
  require(inputs.positional.size() <= parameters_.size(), inputs.positional.size(),
          " inputs are given; the model was exported with ", parameters_.size());
  if (inputs.positional.size() > positions_.size())
    throw std::invalid_argument(
        "input " + std::to_string(positions_.size()) +
        " is given by position, where the model takes it by name (NamedInputs): it was exported with " +
        known_parameters() + ", whose order in Python the archive does not have");
  std::vector<const ExportedValue*> given(parameters_.size());
  for (size_t i = 0; i < inputs.positional.size(); ++i) given[positions_[i]] = &inputs.positional[i];
  for (const auto& [name, value] : inputs.named) {
    const ExportedValue*& own = given[parameter_named(name)];
    if (own != nullptr) throw std::invalid_argument("the input '" + name + "' is given twice");
    own = &value;
  }
  std::vector<ExportedValue> leaves;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    if (given[i] != nullptr) {
      parameter.structure.flatten(*given[i], "input '" + parameter.name + "'", leaves);
      continue;
    }
    for (size_t leaf = parameter.first_leaf; leaf < parameter.first_leaf + parameter.leaf_count; ++leaf) {
      if (!leaves_[leaf].constant) throw std::invalid_argument(leaves_[leaf].label + " is missing");
      leaves.push_back(*leaves_[leaf].constant);
    }
  }
  return leaves;
}

void InputSignature::check_tensor(const Leaf& leaf, const at::Tensor& tensor, at::Device device,
                                  ShapeCheck& shapes) const {
  require(may_stand_for(tensor.scalar_type(), leaf.dtype), leaf.label, " is ", c10::toString(tensor.scalar_type()),
          ", exported as ", c10::toString(leaf.dtype));
  require(tensor.device() == device || tensor.dim() == 0, leaf.label, " is on ", tensor.device(),
          ", expected the model's device, ", device);
  require(static_cast<size_t>(tensor.dim()) == leaf.sizes.size(), leaf.label, " has ", tensor.dim(),
          " dimensions, exported with ", leaf.sizes.size());
  for (size_t i = 0; i < leaf.sizes.size(); ++i)
    shapes.add("dimension " + std::to_string(i) + " of " + leaf.label, leaf.sizes[i],
               tensor.size(static_cast<int64_t>(i)));
}

c10::IValue InputSignature::check_leaf(const Leaf& leaf, const ExportedValue& value, at::Device device,
                                       ShapeCheck& shapes) const {
  if (leaf.constant) {
    if (!same_constant(*leaf.constant, value))
      throw std::invalid_argument(leaf.label + " is " + constant_text(value) + "; it was " +
                                  constant_text(*leaf.constant) +
                                  " when the model was exported, and has become part of it");
    return {};
  }
  if (leaf.is_tensor) {
    if (!value.is_tensor()) throw std::invalid_argument(leaf.label + " is " + value.kind() + ", exported as a tensor");
    check_tensor(leaf, value.tensor(), device, shapes);
    return value.tensor();
  }
  if (!value.is_int()) throw std::invalid_argument(leaf.label + " is " + value.kind() + ", exported as an integer");
  shapes.add(leaf.label, *leaf.number, value.to_int());
  return value.to_int();
}

std::vector<c10::IValue> InputSignature::bind(const ExportedInputs& inputs, at::Device device) const {
  const std::vector<ExportedValue> leaves = gather(inputs);
  ShapeCheck shapes(*this);
  std::vector<c10::IValue> values;
  for (size_t i = 0; i < leaves.size(); ++i) values.push_back(check_leaf(leaves_[i], leaves[i], device, shapes));
  shapes.finish();
  for (const Guard& guard : guards_)
    require(guard.holds(values), "the model was exported for inputs with ", guard.text(),
            ": with these Python's code goes another way than the graph");
  return values;
}

std::string InputSignature::other_dtypes(const ExportedInputs& inputs) const {
  std::string text;
  const std::vector<ExportedValue> given = gather(inputs);
  for (size_t i = 0; i < given.size(); ++i)
    if (leaves_[i].is_tensor && given[i].tensor().scalar_type() != leaves_[i].dtype)
      text += (text.empty() ? "" : ", ") + leaves_[i].label + " is " + c10::toString(given[i].tensor().scalar_type()) +
              ", exported as " + c10::toString(leaves_[i].dtype);
  return text;
}

// ---- example inputs -----------------------------------------------------------------------------

Expression::Symbols InputSignature::chosen_sizes(int64_t batch, int64_t sequence) const {
  ShapeCheck check(*this);
  const auto choose = [&](int64_t wanted, size_t dim, bool of_integers) {
    if (wanted == 0) return;
    const auto leaf = std::ranges::find_if(leaves_, [&](const Leaf& each) {
      return each.is_tensor && each.sizes.size() > dim &&
             (!of_integers || at::isIntegralType(each.dtype, /*includeBool=*/false));
    });
    require(leaf != leaves_.end(), "the model has no input with a dimension ", dim, " to be ", wanted);
    check.add("dimension " + std::to_string(dim) + " of " + leaf->label, leaf->sizes[dim], wanted);
  };
  choose(batch, 0, false);
  choose(sequence, 1, true);
  check.finish();
  Expression::Symbols symbols = check.symbols();
  symbols.insert(exported_with_.begin(), exported_with_.end());
  for (const auto& [symbol, range] : ranges_) symbols.try_emplace(symbol, range.least.value_or(1));
  return symbols;
}

NamedInputs InputSignature::zeros(int64_t batch, int64_t sequence) const {
  const Expression::Symbols symbols = chosen_sizes(batch, sequence);
  const auto size_of = [&](const Leaf& leaf, const Expression& size) {
    const auto value = size.evaluate(symbols);
    require(value && *value >= 0, leaf.label, ": its size ", size.to_string(),
            " is not known; give a batch and a sequence");
    return *value;
  };
  NamedInputs inputs;
  for (const Parameter& parameter : parameters_) {
    std::vector<ExportedValue> values;
    for (size_t i = parameter.first_leaf; i < parameter.first_leaf + parameter.leaf_count; ++i) {
      const Leaf& leaf = leaves_[i];
      std::vector<int64_t> sizes;
      for (const Expression& size : leaf.sizes) sizes.push_back(size_of(leaf, size));
      values.push_back(leaf.constant    ? *leaf.constant
                       : leaf.is_tensor ? ExportedValue(at::zeros(sizes, at::TensorOptions(at::kCPU).dtype(leaf.dtype)))
                                        : ExportedValue(size_of(leaf, *leaf.number)));
    }
    inputs.add(parameter.name, parameter.structure.unflatten(values));
  }
  return inputs;
}

}  // namespace tessera::internal
