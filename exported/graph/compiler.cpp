#include "exported/graph/compiler.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include <tessera/errors.h>
#include "core/runtime/require.h"
#include "exported/archive/fields.h"
#include "exported/graph/arguments.h"

namespace tessera::internal {

using nlohmann::json;

// ---- node metadata -------------------------------------------------------------------------------

namespace {

constexpr std::string_view kHigherOrder = "torch.ops.higher_order.";

std::string metadata_of(const json& node, const char* name) {
  const auto metadata = node.find("metadata");
  if (metadata == node.end() || !metadata->is_object()) return "";
  const auto found = metadata->find(name);
  return found != metadata->end() && found->is_string() ? found->get<std::string>() : "";
}

// Formats the last frame of a Python stack trace: ", model.py:12: return self.fc(x)". Returns "" if there is no frame.
std::string line_of(const std::string& stack) {
  const size_t file = stack.rfind("File \"");
  if (file == std::string::npos) return "";
  const size_t name_end = stack.find('"', file + 6), line = stack.find("line ", file);
  if (name_end == std::string::npos || line == std::string::npos) return "";
  const std::string path = stack.substr(file + 6, name_end - file - 6);
  std::string text =
      ", " + path.substr(path.rfind('/') + 1) + ":" + stack.substr(line + 5, stack.find(',', line) - line - 5);
  if (const size_t code = stack.find("\n    ", line); code != std::string::npos)
    text += ": " + stack.substr(code + 5, std::min<size_t>(stack.find('\n', code + 5) - code - 5, 200));
  return text;
}

template <class Visit>
void for_each_inner_graph(const json& node, Visit visit) {
  for (const json& input : list_field(node, "inputs")) {
    const auto [kind, value] = alternative_of(field(input, "arg"));
    if (kind == "as_graph") visit(object_field(value, "graph"));
  }
}

}  // namespace

// Parses nn_module_stack: "key,path,class;key,path,class". The key of a module's second call ends with "@1".
std::vector<ModuleCall> module_calls(const json& node) {
  const std::string stack = metadata_of(node, "nn_module_stack");
  std::vector<ModuleCall> calls;
  for (size_t begin = 0; begin < stack.size();) {
    size_t end = stack.find(';', begin);
    if (end == std::string::npos) end = stack.size();
    const std::string entry = stack.substr(begin, end - begin);
    begin = end + 1;
    const size_t last = entry.rfind(',');
    if (last == std::string::npos || last == 0) continue;
    const size_t first = entry.rfind(',', last - 1);
    if (first == std::string::npos || entry.starts_with("_empty_nn_module_stack")) continue;
    std::string path = entry.substr(first + 1, last - first - 1);
    path = path.substr(0, path.find('@'));
    const std::string key = entry.substr(0, first);
    const size_t number = key.rfind('@');
    calls.push_back({path, path + (number == std::string::npos ? "" : key.substr(number)), entry.substr(last + 1)});
  }
  return calls;
}

void find_classes(const json& graph, std::map<std::string, std::string>& classes) {
  for (const json& node : list_field(graph, "nodes")) {
    for (ModuleCall& call : module_calls(node)) classes.emplace(std::move(call.fqn), std::move(call.class_name));
    for_each_inner_graph(node, [&](const json& inner) { find_classes(inner, classes); });
  }
}

// ---- graphs -------------------------------------------------------------------------------------

struct Compiler::Scope {
  std::map<std::string, int> slots;
  std::map<int, size_t> state;  // maps slots to indices in Execution::state; includes state passed by a calling graph
  Graph& graph;

  int add(const std::string& name) {
    if (name.empty()) return kNoSlot;
    if (!slots.emplace(name, graph.slot_count).second) throw ExportedError("two values have the name '" + name + "'");
    return graph.slot_count++;
  }
  // Adds the values of a node's outputs, and appends their slots to `results`.
  ReturnLengths add_outputs(const json& node, std::vector<int>& results) {
    ReturnLengths lengths;
    for (const json& output : list_field(node, "outputs")) {
      const auto [kind, value] = alternative_of(output);
      const bool is_list = kind == "as_tensors";
      if (is_list && !value.is_array()) throw ExportedError("a list of results was expected");
      lengths.push_back(is_list ? static_cast<int>(value.size()) : -1);
      if (!is_list) results.push_back(add(name_of_value(output)));
      for (size_t i = 0; is_list && i < value.size(); ++i) results.push_back(add(text_field(value[i], "name")));
    }
    return lengths;
  }
  FindSlot finder() const {
    return [this](const std::string& name) {
      const auto found = slots.find(name);
      if (found == slots.end()) throw ExportedError("nothing before it makes the value '" + name + "'");
      return found->second;
    };
  }
  std::optional<size_t> state_of(int slot) const {
    const auto found = state.find(slot);
    return found == state.end() ? std::nullopt : std::optional(found->second);
  }
};

std::shared_ptr<Graph> Compiler::compile(const json& graph) {
  auto compiled = compile_graph(graph, options_.state, /*is_top=*/true);
  bind_training_arguments();
  return compiled;
}

std::shared_ptr<Graph> Compiler::compile_graph(const json& graph, const StateNames& state, bool is_top) {
  auto compiled = std::make_shared<Graph>();
  Scope scope{{}, {}, *compiled};
  for (const json& input : list_field(graph, "inputs")) {
    const std::string name = name_of_value(input);
    const int slot = scope.add(name);
    const auto own = state.find(name);
    if (own != state.end()) scope.state[slot] = own->second;
    const bool is_looked_up = is_top && own != state.end();
    if (is_looked_up) compiled->state.push_back({slot, own->second});
    compiled->inputs.push_back(is_looked_up ? kNoSlot : slot);
  }
  std::vector<std::vector<ModuleCall>> calls;
  for (const json& node : list_field(graph, "nodes")) {
    auto step = compile_node(node, scope);
    if (!step) continue;
    compiled->steps.push_back(std::move(step));
    calls.push_back(module_calls(node));
  }
  for (const json& output : list_field(graph, "outputs"))
    compiled->outputs.push_back(read_argument(output, scope.finder()));
  if (is_top && options_.is_checkpointed) fold_segments(*compiled, calls);
  compiled->plan_lifetimes();
  return compiled;
}

std::unique_ptr<Step> Compiler::compile_node(const json& node, Scope& scope) {
  const std::string target = text_field(node, "target");
  const auto calls = module_calls(node);
  const auto name = node.find("name");
  const std::string own = name != node.end() && name->is_string() ? name->get<std::string>() : "";
  Description description{
      "node " + (own.empty() ? "" : "'" + own + "' ") + "(" + target + ")" + line_of(metadata_of(node, "stack_trace")),
      calls.empty() ? "" : calls.back().fqn};
  // Skips assertions of the dtypes and devices of the export, because the assertions would fail under mixed precision
  // or on another device. Operators check their arguments themselves.
  if (target == "torch.ops.aten._assert_tensor_metadata.default") return nullptr;
  const std::string where = description.text;
  try {
    if (target.starts_with(kHigherOrder))
      return compile_higher_order(node, target.substr(kHigherOrder.size()), scope, std::move(description));
    const json& inputs = list_field(node, "inputs");
    const auto function = NumberStep::find(target, inputs.size());
    if (function == nullptr) return compile_operator(node, scope, std::move(description));
    std::vector<Operand> operands;
    for (const json& input : inputs) operands.push_back(read_argument(field(input, "arg"), scope.finder()));
    auto step = std::make_unique<NumberStep>(std::move(description.text), std::move(description.module), function,
                                             std::move(operands));
    if (list_field(node, "outputs").size() != 1) throw ExportedError("it has not one result");
    step->results().push_back(scope.add(name_of_value(list_field(node, "outputs")[0])));
    return step;
  } catch (const ExportedError& error) {
    throw ExportedError(where + ": " + error.what());
  }
}

// ---- operators ----------------------------------------------------------------------------------

namespace {

// Returns a node's arguments in the order of the schema. Uses the schema's default for a missing argument.
std::vector<Operand> read_operands(const json& node, const c10::FunctionSchema& schema, const FindSlot& find_slot) {
  std::vector<const json*> given(schema.arguments().size());
  for (const json& input : list_field(node, "inputs")) {
    const std::string name = text_field(input, "name");
    const auto index = schema.argumentIndexWithName(name);
    if (!index) throw ExportedError("it has no argument '" + name + "'");
    given[static_cast<size_t>(*index)] = &field(input, "arg");
  }
  std::vector<Operand> operands;
  for (size_t i = 0; i < given.size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (given[i] != nullptr) {
      try {
        operands.push_back(read_argument(*given[i], argument.type(), argument.N().value_or(1), find_slot));
      } catch (const ExportedError& error) {
        throw ExportedError("'" + argument.name() + "': " + error.what());
      }
    } else if (argument.default_value()) {
      operands.push_back(Operand::constant(*argument.default_value()));
    } else if (argument.type()->kind() == c10::TypeKind::OptionalType) {
      operands.push_back(Operand::constant({}));
    } else {
      throw ExportedError("its argument '" + argument.name() + "' is missing");
    }
  }
  return operands;
}

}  // namespace

std::unique_ptr<Step> Compiler::compile_operator(const json& node, Scope& scope, Description description) {
  const c10::OperatorHandle op = find_operator(text_field(node, "target"), options_.namespaces);
  auto operands = read_operands(node, op.schema(), scope.finder());
  std::vector<int> results;
  ReturnLengths returns = scope.add_outputs(node, results);
  require<ExportedError>(returns.size() <= op.schema().returns().size(), "it has ", returns.size(),
                         " results, the operator returns ", op.schema().returns().size());
  auto step = std::make_unique<OperatorStep>(std::move(description.text), std::move(description.module), op,
                                             std::move(operands), std::move(returns));
  step->results() = std::move(results);
  note_training_argument(*step, scope);
  return step;
}

void Compiler::note_training_argument(OperatorStep& step, const Scope& scope) {
  const auto& schema = step.op().schema();
  const auto& operands = step.operands();
  if (schema.name() == "aten::add_" && operands[0].kind() == Operand::Kind::kSlot) {
    const auto state = scope.state_of(operands[0].slots()[0]);
    const auto counter = state ? options_.batch_counters.find(*state) : options_.batch_counters.end();
    if (counter != options_.batch_counters.end()) counters_.push_back({&step, counter->second});
  }
  const auto argument = training_argument(schema);
  if (!argument) return note_mode(step);
  if (operands[argument->index].kind() != Operand::Kind::kConstant) return;
  const c10::IValue& value = operands[argument->index].constant();
  // Without running statistics, a norm does not depend on the mode: it always uses the statistics of the batch.
  if (const auto mean = schema.argumentIndexWithName("running_mean");
      mean && operands[*mean].kind() == Operand::Kind::kConstant && operands[*mean].constant().isNone())
    return;
  const bool trains =
      argument->is_probability ? value.isDouble() && value.toDouble() > 0 : value.isBool() && value.toBool();
  if (argument->is_probability && !trains) return;
  const bool is_dropout = argument->is_probability || schema.name().find("dropout") != std::string::npos;
  if (const auto& modes = options_.modes; modes && ((is_dropout && trains && modes->always.contains(step.module())) ||
                                                    modes->pinned.contains(step.module())))
    return;
  const size_t module = trained_module(step.module());
  trained_[module].was_training = trained_[module].was_training || trains;
  switched_.push_back({&step, *argument, module});
}

size_t Compiler::trained_module(const std::string& fqn) {
  const auto own = std::ranges::find(trained_, fqn, &TrainedModule::fqn);
  if (own != trained_.end()) return static_cast<size_t>(own - trained_.begin());
  trained_.push_back({fqn, false, ""});
  return trained_.size() - 1;
}

// Records whether an operator without a mode argument is fixed to eval(), and whether it draws random numbers.
void Compiler::note_mode(const OperatorStep& step) {
  const std::string& name = step.op().schema().name();
  if (evaluates_for_good(step.op().schema()))
    trained_[trained_module(step.module())].why_fixed = name + " is batch norm of eval() for good";
  if (step.op().hasTag(at::Tag::nondeterministic_seeded)) random_.emplace(step.module(), name);
}

void Compiler::bind_training_arguments() {
  for (const Switched& one : switched_)
    one.step->switch_with({one.argument, one.module, trained_[one.module].was_training});
  for (const Counter& counter : counters_) {
    const auto module = std::ranges::find(trained_, counter.module, &TrainedModule::fqn);
    const bool is_used = counter.step->results().empty() || counter.step->results()[0] != kNoSlot;
    if (module != trained_.end() && !is_used)
      counter.step->run_only_in_training(static_cast<size_t>(module - trained_.begin()));
  }
}

// ---- higher-order operators ---------------------------------------------------------------------

class Compiler::HigherOrderArguments {
 public:
  explicit HigherOrderArguments(const json& node) {
    for (const json& input : list_field(node, "inputs")) {
      const auto kind = input.find("kind");
      if (kind == input.end() || kind->is_null() || *kind != 2)
        arguments_.push_back(&field(input, "arg"));  // keeps positional arguments only
    }
  }
  const json& next(const char* expected) {
    if (next_ == arguments_.size()) throw ExportedError("an argument is missing: " + std::string(expected));
    const auto [kind, value] = alternative_of(*arguments_[next_]);
    if (kind != expected) throw ExportedError("an argument is of the kind '" + kind + "', expected '" + expected + "'");
    ++next_;
    return value;
  }
  const json* next_if(const char* expected) {
    if (next_ == arguments_.size()) return nullptr;
    if (alternative_of(*arguments_[next_]).kind == expected) return &next(expected);
    ++next_;  // skips None
    return nullptr;
  }
  const json& next_graph() { return object_field(next("as_graph"), "graph"); }
  const json& next_any() {
    if (next_ == arguments_.size()) throw ExportedError("an argument is missing");
    return *arguments_[next_++];
  }
  std::vector<Operand> rest(const FindSlot& find_slot) {
    std::vector<Operand> operands;
    for (; next_ < arguments_.size(); ++next_)
      for (Operand& operand : read_arguments(*arguments_[next_], find_slot)) operands.push_back(std::move(operand));
    return operands;
  }

 private:
  std::vector<const json*> arguments_;
  size_t next_ = 0;
};

std::unique_ptr<Step> Compiler::compile_higher_order(const json& node, const std::string& name, Scope& scope,
                                                     Description description) {
  HigherOrderArguments arguments(node);
  auto step = compile_call(name, arguments, scope, std::move(description));
  scope.add_outputs(node, step->results());
  require<ExportedError>(step->results().size() == step->result_count(), "it has ", step->results().size(),
                         " results, its graph has ", step->result_count());
  return step;
}

// Reads the arguments of a higher-order operator's node, and collects them as operands and graphs in `call`.
struct Compiler::CallReader {
  Compiler& compiler;
  HigherOrderArguments& arguments;
  FindSlot find_slot;
  GraphStep::Call call;
  std::shared_ptr<Graph> last_graph;

  // Reads the next graph, and returns its number of results.
  size_t take_graph() { return take_graph(arguments.next_graph(), {}); }
  size_t take_graph(const json& graph, const StateNames& state) {
    last_graph = compiler.compile_graph(graph, state, false);
    call.graphs.push_back(last_graph);
    return last_graph->outputs.size();
  }
  // Reads a graph and all remaining operands. Marks the graph's inputs that receive state (see StateNames).
  void take_graph_and_rest(const Scope& scope) {
    const json& graph = arguments.next_graph();
    add(arguments.rest(find_slot));
    const json& inputs = list_field(graph, "inputs");
    StateNames state;
    for (size_t i = 0; i < std::min(inputs.size(), call.operands.size()); ++i) {
      const Operand& given = call.operands[i];
      const auto own = given.kind() == Operand::Kind::kSlot ? scope.state_of(given.slots()[0]) : std::nullopt;
      if (own) state[name_of_value(inputs[i])] = *own;
    }
    take_graph(graph, state);
    take_rest();
  }
  size_t take_operands() {
    add(read_arguments(arguments.next_any(), find_slot));
    return call.operands.size();
  }
  // Reads the remaining operands. Each graph takes the operands from index `first` on. Throws if their count differs.
  void take_rest(size_t first = 0) {
    add(arguments.rest(find_slot));
    for (const auto& graph : call.graphs)
      if (const size_t given = call.operands.size() - first; graph->inputs.size() != given)
        throw ExportedError("its graph takes " + std::to_string(graph->inputs.size()) + " values and is given " +
                            std::to_string(given));
  }
  void add(std::vector<Operand> operands) {
    for (Operand& operand : operands) call.operands.push_back(std::move(operand));
  }
};

std::unique_ptr<GraphStep> Compiler::compile_call(const std::string& name, HigherOrderArguments& arguments,
                                                  Scope& scope, Description description) {
  CallReader reader{
      *this, arguments, scope.finder(), {std::move(description.text), std::move(description.module), {}, {}}, nullptr};
  if (name == "wrap_with_set_grad_enabled") {
    const bool mode = bool_of(arguments.next("as_bool"));
    reader.take_graph_and_rest(scope);
    return std::make_unique<GradModeStep>(std::move(reader.call), mode);
  }
  if (name == "wrap_with_autocast") {
    const AutocastStep::Mode mode = autocast_mode(arguments);
    reader.take_graph_and_rest(scope);
    return std::make_unique<AutocastStep>(std::move(reader.call), mode);
  }
  if (name == "cond") {
    reader.call.operands = {read_argument(arguments.next_any(), reader.find_slot)};
    const size_t outputs = reader.take_graph();
    if (outputs != reader.take_graph()) throw ExportedError("its graphs differ in outputs");
    reader.take_rest(1);
    return std::make_unique<ConditionStep>(std::move(reader.call));
  }
  if (name == "tag_activation_checkpoint" || name == "wrap_activation_checkpoint") {
    reader.take_graph_and_rest(scope);
    move_state_into(*reader.last_graph, reader.call.operands, scope);
    return std::make_unique<CheckpointStep>(std::move(reader.call));
  }
  if (auto loop = compile_loop(name, reader)) return loop;
  throw ExportedError("this higher-order operator is not supported");
}

// Compiles while_loop, scan or map_impl. Returns null for any other operator.
std::unique_ptr<GraphStep> Compiler::compile_loop(const std::string& name, CallReader& reader) {
  if (name == "while_loop") {
    reader.take_graph();
    const size_t outputs = reader.take_graph(), operands = reader.take_operands();
    require<ExportedError>(outputs == operands, "its body makes ", outputs, " values of ", operands);
    reader.take_rest();
    return std::make_unique<LoopStep>(std::move(reader.call));
  }
  if (name != "scan" && name != "map_impl") return nullptr;
  const size_t results = reader.take_graph();
  const size_t carried = name == "scan" ? reader.take_operands() : 0;
  const size_t scanned = reader.take_operands() - carried;
  require<ExportedError>(carried <= results, "its graph makes ", results, " values, expected the ", carried,
                         " that are carried on or more");
  reader.take_rest();
  return std::make_unique<ScanStep>(std::move(reader.call), carried, scanned);
}

AutocastStep::Mode Compiler::autocast_mode(HigherOrderArguments& arguments) const {
  AutocastStep::Mode mode;
  // Autocast for the device type of the export applies to the execution's device. Autocast for other types is a no-op.
  mode.applies = text_of(arguments.next("as_string")) == options_.device_type;
  if (const json* dtype = arguments.next_if("as_scalar_type")) mode.dtype = dtype_of_export(*dtype);
  mode.enabled = bool_of(arguments.next("as_bool"));
  if (const json* cache = arguments.next_if("as_bool")) mode.cache_enabled = bool_of(*cache);
  return mode;
}

// Makes a checkpointed graph read its state from Execution::state, not from inputs, which CheckpointStep detaches.
void Compiler::move_state_into(Graph& graph, std::vector<Operand>& operands, const Scope& scope) {
  std::vector<Operand> given = std::exchange(operands, {});
  std::vector<int> inputs;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto state = given[i].kind() == Operand::Kind::kSlot ? scope.state_of(given[i].slots()[0]) : std::nullopt;
    if (state && graph.inputs[i] != kNoSlot) {
      graph.state.push_back({graph.inputs[i], *state});
    } else {
      operands.push_back(std::move(given[i]));
      inputs.push_back(graph.inputs[i]);
    }
  }
  graph.inputs = std::move(inputs);
}

// ---- recomputed modules -------------------------------------------------------------------------

struct Compiler::Segment {
  std::string instance;
  size_t first, last;  // indices of the first and the last step
};

// Replaces all steps of each checkpointed module call by one CheckpointStep. Throws if the steps of calls interleave.
void Compiler::fold_segments(Graph& graph, const std::vector<std::vector<ModuleCall>>& calls) {
  std::vector<Segment> segments;
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto outermost = std::ranges::find_if(
        calls[i], [&](const ModuleCall& call) { return !call.fqn.empty() && options_.is_checkpointed(call.fqn); });
    if (outermost == calls[i].end()) continue;
    const auto known = std::ranges::find(segments, outermost->instance, &Segment::instance);
    known == segments.end() ? segments.push_back({outermost->instance, i, i}) : void(known->last = i);
  }
  std::ranges::sort(segments, {}, &Segment::first);
  for (size_t i = 1; i < segments.size(); ++i)
    require<ExportedError>(segments[i].first > segments[i - 1].last, "the module '", segments[i].instance,
                           "' cannot be checkpointed: its operators lie among those of '", segments[i - 1].instance,
                           "'");
  for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment) {
    auto step = fold(graph, *segment);
    const auto begin = graph.steps.begin() + static_cast<std::ptrdiff_t>(segment->first);
    graph.steps.erase(begin + 1, graph.steps.begin() + static_cast<std::ptrdiff_t>(segment->last) + 1);
    *begin = std::move(step);
  }
}

std::unique_ptr<Step> Compiler::fold(Graph& graph, const Segment& segment) {
  auto inner = std::make_shared<Graph>();
  std::map<int, int> renamed;
  auto rename = [&](int slot) {
    const auto [found, is_new] = renamed.emplace(slot, inner->slot_count);
    if (is_new) ++inner->slot_count;
    return found->second;
  };
  std::set<int> used_after;
  for (const Operand& output : graph.outputs) used_after.insert(output.slots().begin(), output.slots().end());
  for (size_t i = segment.last + 1; i < graph.steps.size(); ++i)
    for (const Operand& operand : graph.steps[i]->operands())
      used_after.insert(operand.slots().begin(), operand.slots().end());

  std::vector<Operand> operands;
  std::vector<int> results;
  for (size_t i = segment.first; i <= segment.last; ++i) {
    Step& step = *graph.steps[i];
    for (Operand& operand : step.operands()) {
      for (const int slot : operand.slots()) {
        if (slot == kNoSlot) continue;
        if (!renamed.contains(slot)) {  // the slot is defined outside the segment
          const auto own = std::ranges::find(graph.state, slot, &Graph::State::slot);
          if (own != graph.state.end()) {
            inner->state.push_back({rename(slot), own->index});
          } else {
            operands.push_back(Operand::slot(slot));
            inner->inputs.push_back(rename(slot));
          }
        }
      }
      operand.rename_slots([&](int slot) { return slot == kNoSlot ? slot : rename(slot); });
    }
    for (int& result : step.results()) {
      if (result == kNoSlot) continue;
      const int outer = result;
      result = rename(outer);
      if (!used_after.contains(outer)) continue;
      results.push_back(outer);
      inner->outputs.push_back(Operand::slot(result));
    }
    inner->steps.push_back(std::move(graph.steps[i]));
  }
  inner->plan_lifetimes();
  auto folded = std::make_unique<CheckpointStep>(GraphStep::Call{
      "module '" + segment.instance + "', checkpointed", segment.instance, std::move(operands), {inner}});
  folded->results() = std::move(results);
  return folded;
}

}  // namespace tessera::internal
