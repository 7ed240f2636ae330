#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

// A condition on a model's inputs that decided Python's control flow during the export. The graph itself does not check
// the condition. A guard is a Python expression over numbers, and over sizes, strides and offsets of tensors:
//
//   L['x'].size()[0] > L['y'].size()[0]        (L['d']['ids'].size()[1] % 4) == 0
class Guard {
 public:
  // An input to which a guard refers by a label ("x", "d['ids']", "xs[0]"). `index` is the index in a call's inputs.
  struct Input {
    size_t index = 0;
    std::optional<int64_t> dimensions;    // number of dimensions; set only for a tensor
    std::optional<c10::IValue> constant;  // set only for a number that is a constant in the graph
  };
  using FindInput = std::function<std::optional<Input>(const std::string& label)>;

  // Throws ExportedError for a syntax error, an unknown input or an unknown function.
  static Guard parse(const std::string& text, const FindInput& find_input);

  bool holds(const std::vector<c10::IValue>& inputs) const;  // throws c10::Error for overflow or division by zero
  const std::string& text() const { return text_; }

 private:
  enum class Kind : uint8_t { kConstant, kNumber, kSize, kStride, kOffset, kCall, kAnd, kOr, kNot };
  struct Node {
    Kind kind = Kind::kConstant;
    c10::IValue constant;
    size_t input = 0;
    int64_t dimension = 0;
    c10::IValue (*function)(const std::vector<c10::IValue>& arguments) = nullptr;
    std::vector<Node> operands;
  };
  class Parser;
  static c10::IValue evaluate(const Node& node, const std::vector<c10::IValue>& inputs);

  Guard(std::string text, Node node) : text_(std::move(text)), node_(std::move(node)) {}
  std::string text_;
  Node node_;
};

}  // namespace tessera::internal
