#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {

// An executable graph of operators. Values have numbered slots instead of names, and operators are already resolved.

constexpr int kNoSlot = -1;

// The state that a forward pass reads besides its arguments. CheckpointStep keeps this object alive for recomputation.
struct Execution {
  std::vector<at::Tensor> state;  // parameters, buffers and constants
  std::vector<uint8_t> training;  // one entry for each module that depends on the mode: 1 if in train(), else 0
  at::Device device = at::kCPU;   // replaces every device in the archive, except meta
};

// The values of one run of a graph.
struct Frame {
  std::vector<c10::IValue> values;  // indexed by slot
  const std::shared_ptr<const Execution>& execution;
};

// Returns a 0-d tensor that takes part in dtype promotion like a Python number.
at::Tensor wrapped_number(const c10::IValue& number);

// The source of an argument: a constant, the device, a slot, or a list.
class Operand {
 public:
  enum class Kind : uint8_t {
    kConstant,
    kDevice,         // the execution's device
    kSlot,           // the value of a slot
    kWrappedNumber,  // a slot's number as a wrapped_number()
    kFloat,          // a slot's number as a float
    kTensors,        // this and all later kinds are lists of slot values, with constants where the slot is kNoSlot
    kOptionalTensors,
    kInts,
    kFloats,
    kBools,
  };

  static Operand constant(c10::IValue value) { return {Kind::kConstant, {}, {}, std::move(value)}; }
  static Operand device() { return {Kind::kDevice}; }
  static Operand slot(int slot, Kind kind = Kind::kSlot) { return {kind, {slot}}; }
  static Operand list(Kind kind, std::vector<int> slots, std::vector<c10::IValue> constants) {
    return {kind, std::move(slots), std::move(constants)};
  }

  c10::IValue get(Frame& frame) const;

  Kind kind() const { return kind_; }
  const std::vector<int>& slots() const { return slots_; }
  const c10::IValue& constant() const { return constant_; }
  template <class Rename>
  void rename_slots(Rename rename) {
    for (int& slot : slots_) slot = rename(slot);
  }
  // Marks the operand as the last use of its slot, so that get() moves the value out of the slot.
  void set_last_use() { is_last_use_ = true; }

 private:
  Operand(Kind kind, std::vector<int> slots = {}, std::vector<c10::IValue> constants = {}, c10::IValue constant = {})
      : kind_(kind), constant_(std::move(constant)), slots_(std::move(slots)), constants_(std::move(constants)) {}
  template <class Element, class Get>
  c10::IValue list_of(Get get) const;

  Kind kind_;
  bool is_last_use_ = false;
  c10::IValue constant_;
  std::vector<int> slots_;
  std::vector<c10::IValue> constants_;  // list elements, used where the slot is kNoSlot
};

// One node of a graph. After the graph is complete, its steps are immutable and thread-safe.
class Step {
 public:
  Step(std::string description, std::string module, std::vector<Operand> operands)
      : description_(std::move(description)), module_(std::move(module)), operands_(std::move(operands)) {}
  virtual ~Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  virtual void run(Frame& frame) const = 0;

  // Returns a text for messages: "node 'linear_3' (torch.ops.aten.linear.default), model.py:12: return self.fc(x)".
  const std::string& description() const { return description_; }
  // Returns the FQN of the node's innermost module. A step of Compiler::fold() has a call's name instead: "head@1".
  const std::string& module() const { return module_; }
  std::vector<Operand>& operands() { return operands_; }
  const std::vector<Operand>& operands() const { return operands_; }
  // The slot of each result, or kNoSlot for an unused result.
  std::vector<int>& results() { return results_; }
  const std::vector<int>& results() const { return results_; }
  // The slots to free after this step, which is their last user. Excludes slots whose values Operand::get() moves out.
  std::vector<int>& frees() { return frees_; }
  const std::vector<int>& frees() const { return frees_; }

 protected:
  void set_result(Frame& frame, size_t result, c10::IValue value) const {
    if (results_[result] != kNoSlot) frame.values[static_cast<size_t>(results_[result])] = std::move(value);
  }

 private:
  const std::string description_;
  const std::string module_;
  std::vector<Operand> operands_;
  std::vector<int> results_;
  std::vector<int> frees_;
};

class Graph {
 public:
  struct State {
    int slot;
    size_t index;  // index in Execution::state
  };
  int slot_count = 0;
  std::vector<int> inputs;  // the slot of each input, or kNoSlot for an unused input
  std::vector<State> state;
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<Operand> outputs;

  // Finds unused values, and the last use of each used value. Must be called once, after all steps have been added.
  void plan_lifetimes();

  // Runs the steps and returns the outputs. Frees each value after its last use. Errors of operators name the node.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs,
                               const std::shared_ptr<const Execution>& execution) const;
};

}  // namespace tessera::internal
