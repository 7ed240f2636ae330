#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <tessera/exported/value.h>
#include "exported/graph/expression.h"
#include "exported/graph/guard.h"
#include "exported/module/structure.h"

namespace tessera::internal {

class ShapeCheck;

// The parameters of Python's forward(*args, **kwargs), and the constraints on their values from the export.
class InputSignature {
 public:
  // Reads the program of an archive. `positional` lists the inputs that callers may pass by position, in order. The
  // list is needed because a program lacks the positions of inputs that were passed by name during the export. If
  // `may_leave_guards` is set, ignores unreadable guards. Throws ExportedError on failure.
  InputSignature(const nlohmann::json& program, const Structure::FieldNames& named_tuples,
                 const std::vector<std::string>& positional, bool may_leave_guards);

  // Checks a call's inputs, and returns the values of the graph's user inputs in order. Throws std::invalid_argument
  // if an input is missing, duplicate, unknown, out of range or (unless 0-d) not on `device`. Also throws if an input's
  // structure, kind, dtype, rank or size does not fit the export, or if a guard does not hold. An input that became a
  // constant of the graph may be missing; if given, it must have the same value as in the export.
  std::vector<c10::IValue> bind(const ExportedInputs& inputs, at::Device device) const;

  // Returns a text that lists the inputs whose dtype differs from the export, to add to an operator's error: "input 'x'
  // is Double, exported as Float". `inputs` must have passed bind().
  std::string other_dtypes(const ExportedInputs& inputs) const;

  // Returns the names of forward's parameters, in order.
  std::vector<std::string> names() const;
  // Returns named inputs with the sizes of the export (the least sizes if unknown): tensors of zeros, and integers. If
  // not 0, `batch` replaces the first size of the first tensor, and `sequence` the second size of the first integer
  // tensor. Dependent sizes change accordingly. Throws std::invalid_argument for unsupported sizes.
  NamedInputs zeros(int64_t batch, int64_t sequence) const;
  // Returns a text with one line for each input ("input 'input_ids': Long [s0, s1]"), symbol range and guard.
  std::string describe() const;

 private:
  struct Parameter {
    std::string name;
    Structure structure;
    size_t first_leaf, leaf_count;
  };
  struct Leaf {
    std::string name;   // "past[0]"
    std::string label;  // "input 'past[0]'"
    bool is_tensor = false;
    at::ScalarType dtype = at::kFloat;
    std::vector<Expression> sizes;
    std::optional<Expression> number;  // the expected value; set only for an integer input of the graph
    std::optional<ExportedValue> constant;
  };
  struct Range {
    std::optional<int64_t> least, most;
  };
  Expression read_size(const nlohmann::json& size);
  Expression::Symbols chosen_sizes(int64_t batch, int64_t sequence) const;
  void read_leaves(const nlohmann::json& graph_module);
  void read_ranges(const nlohmann::json& range_constraints);
  size_t read_parameters(const nlohmann::json& signature, const Structure::FieldNames& named_tuples);
  void read_positions(size_t by_position, const std::vector<std::string>& positional);
  void read_guards(const nlohmann::json& program, bool may_leave_guards);
  std::optional<size_t> leaf_labelled(const std::string& label) const;
  std::optional<Guard::Input> input_labelled(const std::string& label) const;
  std::vector<ExportedValue> gather(const ExportedInputs& inputs) const;
  size_t parameter_named(const std::string& name) const;
  std::string known_parameters() const;
  void check_tensor(const Leaf& leaf, const at::Tensor& tensor, at::Device device, ShapeCheck& shapes) const;
  c10::IValue check_leaf(const Leaf& leaf, const ExportedValue& value, at::Device device, ShapeCheck& shapes) const;
  friend class ShapeCheck;

  std::vector<Parameter> parameters_;
  std::vector<Leaf> leaves_;
  std::vector<size_t> positions_;  // indices of parameters that may be passed by position
  std::map<std::string, Range> ranges_;
  std::vector<Guard> guards_;
  Expression::Symbols exported_with_;  // values of the symbols during the export, as far as the archive stores them
};

}  // namespace tessera::internal
