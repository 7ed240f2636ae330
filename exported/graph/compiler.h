#pragma once

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "exported/archive/record.h"
#include "exported/graph/graph.h"
#include "exported/graph/higher_order_steps.h"
#include "exported/graph/steps.h"

namespace tessera::internal {

// A call of a module, as recorded in a node's metadata.
struct ModuleCall {
  std::string fqn;         // name of the module: "layers.0"
  std::string instance;    // name of the call: the FQN, or "layers.0@1" for the module's second call
  std::string class_name;  // "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
};

// Returns the module calls that contain a node, outermost first. The list is empty for nodes that torch.export added.
std::vector<ModuleCall> module_calls(const nlohmann::json& node);

// For each module that calls an operator, also in a nested graph, adds the FQN and the class name to `classes`.
void find_classes(const nlohmann::json& graph, std::map<std::string, std::string>& classes);

// Compiles a graph's JSON into a Graph. compile() must be called only once. Throws ExportedError for unsupported
// features, naming the node and line if any.
class Compiler {
 public:
  struct Options {
    std::vector<std::string> namespaces;  // allowed operator namespaces besides ATen
    std::map<std::string, size_t> state;  // maps names of graph inputs to indices in Execution::state
    // Maps the index in Execution::state of each buffer num_batches_tracked to the FQN of its module.
    std::map<size_t, std::string> batch_counters;
    std::string device_type = "cpu";                              // device type of the export
    std::optional<ExportedModes> modes;                           // effects of train() and eval(), if known
    std::function<bool(const std::string& fqn)> is_checkpointed;  // whether the module's activations are recomputed
  };
  explicit Compiler(Options options) : options_(std::move(options)) {}

  std::shared_ptr<Graph> compile(const nlohmann::json& graph);

  // A module with operators that depend on train() and eval(), and its mode in the export. After compile(),
  // trained_modules() returns these modules in the order of Execution::training.
  struct TrainedModule {
    std::string fqn;
    bool was_training;
    std::string why_fixed;  // why the module's mode cannot be changed; "" if the mode can be changed
  };
  const std::vector<TrainedModule>& trained_modules() const { return trained_; }
  // Returns each module whose operators draw random numbers in both modes: its FQN, and the name of one operator.
  const std::map<std::string, std::string>& random_modules() const { return random_; }

 private:
  struct Scope;
  class HigherOrderArguments;
  struct CallReader;
  struct Description {
    std::string text, module;
  };
  struct Segment;

  // Maps the names of a graph's state inputs to indices in Execution::state. A graph may pass state to nested graphs.
  using StateNames = std::map<std::string, size_t>;
  std::shared_ptr<Graph> compile_graph(const nlohmann::json& graph, const StateNames& state, bool is_top);
  std::unique_ptr<Step> compile_node(const nlohmann::json& node, Scope& scope);
  std::unique_ptr<Step> compile_operator(const nlohmann::json& node, Scope& scope, Description description);
  std::unique_ptr<Step> compile_higher_order(const nlohmann::json& node, const std::string& name, Scope& scope,
                                             Description description);
  std::unique_ptr<GraphStep> compile_call(const std::string& name, HigherOrderArguments& arguments, Scope& scope,
                                          Description description);
  std::unique_ptr<GraphStep> compile_loop(const std::string& name, CallReader& reader);
  AutocastStep::Mode autocast_mode(HigherOrderArguments& arguments) const;
  static void move_state_into(Graph& graph, std::vector<Operand>& operands, const Scope& scope);
  void note_training_argument(OperatorStep& step, const Scope& scope);
  void note_mode(const OperatorStep& step);
  size_t trained_module(const std::string& fqn);
  void bind_training_arguments();
  void fold_segments(Graph& graph, const std::vector<std::vector<ModuleCall>>& calls);
  std::unique_ptr<Step> fold(Graph& graph, const Segment& segment);

  Options options_;
  struct Switched {
    OperatorStep* step;
    TrainingArgument argument;
    size_t module;
  };
  std::vector<Switched> switched_;
  struct Counter {
    OperatorStep* step;
    std::string module;
  };
  std::vector<Counter> counters_;
  std::vector<TrainedModule> trained_;
  std::map<std::string, std::string> random_;
};

}  // namespace tessera::internal
