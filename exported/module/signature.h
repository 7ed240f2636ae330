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

// The parameters of Python's forward(*args, **kwargs), and the constraints on each value from the export.
class InputSignature {
 public:
  // Reads an archive's program. `positional` lists the inputs that Python takes by position, in order; the archive does
  // not store this for inputs exported by name. `may_leave_guards`: ignores guards that cannot be read. Throws
  // ExportedError.
  InputSignature(const nlohmann::json& program, const Structure::FieldNames& named_tuples,
                 const std::vector<std::string>& positional, bool may_leave_guards);

  // Returns the values of the graph's user inputs, in order. Throws std::invalid_argument that names the input if one
  // is missing, duplicate or unknown, or has another structure, kind, rank, size or device. Also throws if an input is
  // out of range, or differs from a number that is a constant of the graph, or if a guard does not hold: Python would
  // then have run other code.
  std::vector<c10::IValue> bind(const ExportedInputs& inputs, at::Device device) const;

  // Returns the names of forward's parameters, in order.
  std::vector<std::string> names() const;
  // Returns named inputs: tensors of zeros, and integers, of the sizes in the export. `batch` and `sequence`, if not 0,
  // replace the first dimension of the first tensor and the second one of the first integer tensor. Sizes that depend
  // on these follow. Throws std::invalid_argument for unsupported sizes.
  NamedInputs zeros(int64_t batch, int64_t sequence) const;
  // Returns a line for each input ("input 'input_ids': Long [s0, s1]"), each range of a symbol, and each guard.
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
    std::optional<Expression> number;  // the value of an integer input of the graph
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
  Expression::Symbols exported_with_;  // values of symbols in the export, if stored
};

}  // namespace tessera::internal
