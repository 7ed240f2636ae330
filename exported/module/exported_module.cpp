#include <tessera/exported.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include <tessera/errors.h>
#include "checkpoint/format/box.h"
#include "core/runtime/dtypes.h"
#include "core/runtime/require.h"
#include "core/runtime/warn.h"
#include "exported/archive/archive.h"
#include "exported/archive/fields.h"
#include "exported/archive/record.h"
#include "exported/archive/weights.h"
#include "exported/graph/arguments.h"
#include "exported/graph/compiler.h"
#include "exported/module/signature.h"

namespace tessera::internal {

using nlohmann::json;

namespace {

constexpr int kSchemaMajor = 8, kFirstMinor = 9, kLastMinor = 15;  // supports schema 8 of torch 2.9 to 2.15

// A module whose name() is the name of its Python class.
class NamedModule : public torch::nn::Module {
 public:
  explicit NamedModule(const std::string& class_name) : torch::nn::Module(class_name) {}
};

void check_version(const json& program) {
  const std::string version = text_field(program, "torch_version");
  const int64_t major = int_field(object_field(program, "schema_version"), "major");
  int torch_major = 0, torch_minor = 0;
  const bool is_known = std::sscanf(version.c_str(), "%d.%d", &torch_major, &torch_minor) == 2 && torch_major == 2 &&
                        torch_minor >= kFirstMinor && torch_minor <= kLastMinor;
  require<ExportedError>(is_known && major == kSchemaMajor, "it was exported by torch ", version, " (schema ", major,
                         "); expected torch 2.", kFirstMinor, " to 2.", kLastMinor, " (schema ", kSchemaMajor, ")");
}

Structure::FieldNames read_named_tuples(const json& graph_module) {
  Structure::FieldNames names;
  const auto found = graph_module.find("treespec_namedtuple_fields");
  if (found == graph_module.end() || !found->is_object()) return names;
  for (const auto& [type, definition] : found->items()) names[type] = texts_of(list_field(definition, "field_names"));
  return names;
}

std::pair<std::string, std::string> split_name(const std::string& fqn) {
  const size_t dot = fqn.rfind('.');
  return dot == std::string::npos ? std::pair(std::string(), fqn) : std::pair(fqn.substr(0, dot), fqn.substr(dot + 1));
}

ExportedValue value_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  if (value.isNone()) return {};
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isSymInt()) return value.toSymInt().guard_int(__FILE__, __LINE__);
  throw std::logic_error("a result of an exported model is a " + value.tagKind());
}

// Returns the first names of a list, for an error text.
std::string first_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < 10; ++i) text += (i > 0 ? ", '" : "'") + names[i] + "'";
  return text;
}

}  // namespace

// ---- state --------------------------------------------------------------------------------------

// The state and graph of a model. ProgramBuilder creates this object from an archive.
class ExportedProgram {
 public:
  enum class Kind : uint8_t { kParameter, kBuffer, kHidden };  // kHidden: a non-persistent buffer or a constant
  struct StateTensor {
    std::string fqn;
    Kind kind;
    at::Tensor tensor;
    bool is_constant = false;
  };
  // A module that computes correct results only in the mode of the export.
  struct FixedModule {
    torch::nn::Module* module;
    std::string fqn;
    bool is_training;
    std::string why;
  };
  enum class OutputKind : uint8_t { kResult, kState, kInput };
  struct Output {
    OutputKind kind = OutputKind::kResult;
    size_t index = 0;                               // index of the written tensor in `state`, or in the user inputs
    torch::nn::Module* only_in_training = nullptr;  // the module of a batch counter; else null
  };

  std::vector<StateTensor> state;
  std::shared_ptr<const Graph> graph;
  std::unique_ptr<InputSignature> inputs;
  Structure results;
  std::vector<Output> outputs;
  std::vector<torch::nn::Module*> trained_modules;  // in the order of Execution::training
  std::vector<FixedModule> fixed_modules;
  at::Device device = at::kCPU;
  std::shared_ptr<std::atomic<int64_t>> bytes_read = std::make_shared<std::atomic<int64_t>>(0);
  std::map<std::string, int> classes;

  ExportedValue run(const ExportedInputs& given) const;
  void move_hidden(at::Device to);
  void convert_hidden(at::ScalarType to);

 private:
  void refuse_other_modes() const;
};

void ExportedProgram::refuse_other_modes() const {
  const auto mode = [](bool is_training) { return std::string(is_training ? "train()" : "eval()"); };
  for (const FixedModule& own : fixed_modules) {
    if (own.module->is_training() == own.is_training) continue;
    const std::string who = own.fqn.empty() ? "the model" : "the module '" + own.fqn + "' (" + own.module->name() + ")";
    throw std::invalid_argument(who + " is in " + mode(!own.is_training) + ", and was exported in " +
                                mode(own.is_training) + ", from which it cannot be switched: " + own.why);
  }
}

ExportedValue ExportedProgram::run(const ExportedInputs& given) const {
  refuse_other_modes();
  std::vector<c10::IValue> values = inputs->bind(given, device);
  std::vector<at::Tensor> mutable_inputs(values.size());
  for (const Output& output : outputs)
    if (output.kind == OutputKind::kInput) mutable_inputs[output.index] = values[output.index].toTensor();

  auto execution = std::make_shared<Execution>();
  execution->device = device;
  execution->state.reserve(state.size());
  for (const StateTensor& own : state) execution->state.push_back(own.tensor);
  for (const torch::nn::Module* module : trained_modules) execution->training.push_back(module->is_training() ? 1 : 0);
  // The first inputs are for state, and are empty because the graph reads state from `execution`. User inputs follow.
  std::vector<c10::IValue> graph_inputs(state.size());
  for (c10::IValue& value : values) graph_inputs.push_back(std::move(value));
  std::vector<c10::IValue> all;
  try {
    all = graph->run(std::move(graph_inputs), execution);
  } catch (c10::Error& error) {
    if (std::string note = inputs->other_dtypes(given); !note.empty()) error.add_context(std::move(note));
    throw;
  }
  TORCH_CHECK(all.size() <= outputs.size(), "the graph returned ", all.size(), " values, expected ", outputs.size());

  std::vector<ExportedValue> leaves;
  for (size_t i = 0; i < all.size(); ++i) {
    const Output& output = outputs[i];
    if (output.kind == OutputKind::kResult) {
      leaves.push_back(value_of(all[i]));
    } else if (output.kind == OutputKind::kInput) {
      mutable_inputs[output.index].copy_(all[i].toTensor());
    } else if (output.only_in_training == nullptr || output.only_in_training->is_training()) {
      const at::NoGradGuard no_grad;
      at::Tensor target = state[output.index].tensor;
      target.copy_(all[i].toTensor());
    }
  }
  return results.unflatten(leaves);
}

void ExportedProgram::move_hidden(at::Device to) {
  device = to;
  for (StateTensor& own : state)
    if (own.kind == Kind::kHidden) own.tensor = own.tensor.to(device);
}

// Converts floating-point non-persistent buffers, like Python's Module.to(). Does not convert constants.
void ExportedProgram::convert_hidden(at::ScalarType to) {
  for (StateTensor& own : state)
    if (own.kind == Kind::kHidden && !own.is_constant && own.tensor.is_floating_point()) own.tensor = own.tensor.to(to);
}

// ---- building -----------------------------------------------------------------------------------

namespace {

using Kind = ExportedProgram::Kind;

class ProgramBuilder {
 public:
  ProgramBuilder(const std::filesystem::path& path, const ExportedOptions& options, torch::nn::Module& root)
      : archive_(path),
        record_(ExportRecord::read(archive_)),
        options_(options),
        program_(std::make_unique<ExportedProgram>()),
        storages_(archive_.file(), !options.unchecked) {
    modules_[""] = &root;
    program_->device = options.device;
  }

  // Reads the archive, and registers its modules, parameters and buffers in the root module. Must be called only once.
  std::unique_ptr<ExportedProgram> build() {
    const json program = read_program();
    const json& graph_module = object_field(program, "graph_module");
    const json& graph = object_field(graph_module, "graph");
    find_classes(graph, classes_);
    const json& signature = object_field(graph_module, "signature");
    check_names(list_field(signature, "input_specs"), list_field(graph, "inputs"), "inputs");
    check_names(list_field(signature, "output_specs"), list_field(graph, "outputs"), "outputs");
    read_state(signature, graph);
    make_modules();
    fill_state();
    compile(graph);
    const auto named_tuples = read_named_tuples(graph_module);
    program_->inputs = std::make_unique<InputSignature>(program, named_tuples, record_.positional, options_.unchecked);
    read_results(graph_module, named_tuples);
    set_modes();
    return std::move(program_);
  }

 private:
  json read_program() {
    const auto models = archive_.names("models/", ".json");
    if (models.size() != 1) throw ExportedError("it has " + std::to_string(models.size()) + " programs, expected one");
    model_ = models[0].substr(7, models[0].size() - 12);
    json program = parse_archive_json(archive_.text(models[0]), models[0]);
    check_version(program);
    check_gradients(program);
    return program;
  }

  // Warns about a decomposed program, because decomposition drops no_grad(). Throws if alias() nodes replace detach().
  void check_gradients(const json& program) const {
    const auto verifiers = program.find("verifiers");
    if (verifiers == program.end() || !verifiers->is_array()) return;
    const bool is_decomposed =
        std::none_of(verifiers->begin(), verifiers->end(), [](const json& verifier) { return verifier == "TRAINING"; });
    if (!is_decomposed || record_.has_checked_gradients || options_.unchecked) return;
    const std::string what =
        "it is decomposed, which loses torch.no_grad() and detach(): gradients may be others than Python's. Export "
        "without run_decompositions(), or with tools/export_model.py --decompose, which compares them; "
        "ExportedOptions::unchecked takes it as it is";
    const json& graph_module = object_field(program, "graph_module");
    for (const json& node : list_field(object_field(graph_module, "graph"), "nodes"))
      if (text_field(node, "target").starts_with("torch.ops.aten.alias.")) throw ExportedError(what);
    warn(c10::str(archive_.where(), ": ", what));
  }

  // Throws if the sizes or dtypes of a state tensor differ between the graph and the archive's configuration.
  static void check_described(const json& graph, const std::string& value, const ExportedTensor& tensor) {
    const json& meta = object_field(object_field(graph, "tensor_values"), value.c_str());
    std::vector<int64_t> sizes;
    for (const json& size : list_field(meta, "sizes")) sizes.push_back(int_field(size, "as_int"));
    if (sizes != tensor.sizes || dtype_of_export(field(meta, "dtype")) != tensor.dtype)
      throw ExportedError("'" + tensor.name + "' is " + to_string(tensor.sizes) + " " + c10::toString(tensor.dtype) +
                          ", its value '" + value + "' in the graph " + to_string(sizes) + " " +
                          c10::toString(dtype_of_export(field(meta, "dtype"))));
  }

  // Throws if the names in the signature's entries differ from the names of the graph's inputs or outputs.
  static void check_names(const json& entries, const json& values, const char* what) {
    if (entries.size() != values.size())
      throw ExportedError("its signature has another number of " + std::string(what) + " than its graph");
    for (size_t i = 0; i < entries.size(); ++i) {
      const auto [kind, value] = alternative_of(entries[i]);
      if (kind == "constant_input") continue;
      const json& argument = field(value, "arg");
      const bool is_user = kind == "user_input" || kind == "user_output";
      const std::string name = is_user ? name_of_value(argument) : text_field(argument, "name");
      if (name != name_of_value(values[i]))
        throw ExportedError("its graph has '" + name_of_value(values[i]) + "' in the place of the signature's '" +
                            name + "' among the " + what);
    }
  }

  void read_state(const json& signature, const json& graph) {
    auto tensors = read_tensors(archive_, record_, "data/weights/" + model_ + "_weights_config.json", "data/weights/");
    tensors.merge(
        read_tensors(archive_, record_, "data/constants/" + model_ + "_constants_config.json", "data/constants/"));
    for (const json& spec : list_field(signature, "input_specs")) {
      const auto [kind, value] = alternative_of(spec);
      const bool is_parameter = kind == "parameter", is_buffer = kind == "buffer";
      if (!is_parameter && !is_buffer && kind != "tensor_constant") {
        is_user_input_ = true;
        continue;
      }
      if (is_user_input_) throw ExportedError("its inputs are not first the state and then the caller's");
      const std::string name = text_field(value, is_parameter ? "parameter_name"
                                                 : is_buffer  ? "buffer_name"
                                                              : "tensor_constant_name");
      const auto found = tensors.find(name);
      if (found == tensors.end()) throw ExportedError("it has no tensor '" + name + "'");
      const Kind own = is_parameter                                   ? Kind::kParameter
                       : is_buffer && bool_field(value, "persistent") ? Kind::kBuffer
                                                                      : Kind::kHidden;
      check_described(graph, text_field(object_field(value, "arg"), "name"), found->second);
      graph_names_[text_field(object_field(value, "arg"), "name")] = program_->state.size();
      program_->state.push_back({name, own, {}, kind == "tensor_constant"});
      tensors_.push_back(found->second);
      if (!is_parameter) tensors_.back().requires_grad = false;
    }
  }

  // Calls `act`, which registers `fqn` in a module. Throws ExportedError if libtorch refuses the name.
  template <class Register>
  static void registering(const std::string& fqn, Register act) {
    try {
      act();
    } catch (const c10::Error& error) {
      throw ExportedError("'" + fqn + "' cannot be registered: " + error.what_without_backtrace());
    }
  }

  torch::nn::Module& module_named(const std::string& fqn) {
    if (const auto found = modules_.find(fqn); found != modules_.end()) return *found->second;
    const auto [parent, name] = split_name(fqn);
    torch::nn::Module& above = module_named(parent);
    const auto known = classes_.find(fqn);
    auto made = std::make_shared<NamedModule>(known == classes_.end() ? "Module" : known->second);
    registering(fqn, [&] { above.register_module(name, made); });
    modules_[fqn] = made.get();
    return *made;
  }

  void make_modules() {
    for (const auto& own : program_->state)
      if (own.kind != Kind::kHidden) module_named(split_name(own.fqn).first);
    for (const auto& [fqn, name] : classes_) {
      if (fqn.empty()) continue;
      module_named(fqn);
      ++program_->classes[name];
    }
  }

  // ---- values

  // Groups the state by tensor: tied names form one group. Maps the lowest index in a group to all of its indices.
  std::map<size_t, std::vector<size_t>> find_ties() const {
    using Memory = std::tuple<std::string, at::ScalarType, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
    std::map<Memory, size_t> first;
    std::map<size_t, std::vector<size_t>> ties;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const ExportedTensor& own = tensors_[i];
      const Memory memory{own.storage_name, own.dtype, own.offset, own.sizes, own.strides};
      ties[first.try_emplace(memory, i).first->second].push_back(i);
    }
    return ties;
  }

  void fill_state() {
    if (!options_.weights.empty()) files_.emplace(options_.weights, program_->bytes_read);
    for (const auto& [first, same] : find_ties()) {
      const auto visible =
          std::ranges::find_if(same, [&](size_t i) { return program_->state[i].kind != Kind::kHidden; });
      const at::Tensor tensor = make_tensor(visible == same.end() ? first : *visible, same);
      for (const size_t i : same) program_->state[i].tensor = tensor;
    }
    require<ExportedError>(absent_.empty(), "there are no values of ", absent_.size(), " tensors, such as ",
                           first_of(absent_), ": give ExportedOptions::weights or init");
    if (!record_.ties && !options_.unchecked) warn_of_unknown_ties();
    if (files_ && options_.strict) refuse_unused();
    for (auto& own : program_->state) register_tensor(own);
  }

  // Warns if two tensors without values have equal sizes and dtypes, because such tensors may be tied.
  void warn_of_unknown_ties() const {
    for (size_t i = 0; i < tensors_.size(); ++i)
      for (size_t other = 0; other < i; ++other)
        if (!tensors_[i].has_values() && !tensors_[other].has_values() && tensors_[i].sizes == tensors_[other].sizes &&
            tensors_[i].dtype == tensors_[other].dtype) {
          warn(c10::str(
              archive_.where(), ": it has no values, and does not say which tensors are tied, as ",
              "tools/export_model.py does: '", program_->state[other].fqn, "' and '", program_->state[i].fqn,
              "', for two, are taken to be different ones. ExportedOptions::unchecked says that this is right"));
          return;
        }
  }

  void refuse_unused() const {
    const auto unused = files_->unused();
    require<ExportedError>(unused.empty(), options_.weights.string(), " has ", unused.size(),
                           " tensors that the model does not have, such as ", first_of(unused),
                           " (ExportedOptions::weight_name maps names, strict = false leaves them out)");
  }

  std::optional<WeightSource> find_source(const ExportedTensor& tensor, const std::vector<size_t>& names) {
    if (files_ && program_->state[names[0]].kind != Kind::kHidden) {
      std::vector<std::string> own;
      for (const size_t i : names) {
        const std::string& fqn = program_->state[i].fqn;
        own.push_back(options_.weight_name ? options_.weight_name(fqn) : fqn);
      }
      if (auto source = files_->find(own, tensor)) return source;
    }
    return std::nullopt;
  }

  at::Tensor make_tensor(size_t index, const std::vector<size_t>& names) {
    ExportedTensor tensor = tensors_[index];
    const Kind kind = program_->state[index].kind;
    const bool changes_dtype = options_.parameter_dtype && kind == Kind::kParameter && at::isFloatingType(tensor.dtype);
    const at::ScalarType dtype = changes_dtype ? *options_.parameter_dtype : tensor.dtype;
    at::Tensor values = tensor_with_values(tensor, names, dtype, kind);
    if (values.defined()) return values;
    if (!options_.init) {
      for (const size_t i : names) absent_.push_back(program_->state[i].fqn);
      return {};
    }
    // Inside deferred(), the allocation and the call of init() are recorded, and run later.
    values = at::empty_strided(tensor.sizes, tensor.strides, at::TensorOptions().dtype(dtype).device(options_.device));
    const at::NoGradGuard no_grad;
    options_.init(program_->state[index].fqn, values);
    return values;
  }

  // Returns the tensor with its values; undefined if there are none. If strides leave holes, makes `tensor` row-major.
  at::Tensor tensor_with_values(ExportedTensor& tensor, const std::vector<size_t>& names, at::ScalarType dtype,
                                Kind kind) {
    const OrdinaryScope ordinary;
    const bool is_later = is_deferring() && kind != Kind::kHidden;
    const bool has_holes = !fills_memory(tensor.sizes, tensor.strides);
    const ExportedTensor exported = tensor;
    if (has_holes) tensor.strides = row_major_strides(tensor.sizes);
    if (auto source = find_source(tensor, names)) return tensor_from(*source, tensor, dtype, is_later);
    if (!tensor.has_values()) return {};
    if (is_later && !has_holes)
      return tensor_from(read_from(archive_.file(), tensor, !options_.unchecked, program_->bytes_read), tensor, dtype,
                         is_later);
    const at::Tensor values = storages_.read(exported);
    return (has_holes ? values.contiguous() : values).to(options_.device, dtype);
  }

  at::Tensor tensor_from(WeightSource source, const ExportedTensor& tensor, at::ScalarType dtype, bool is_later) const {
    ReadElements read = converted(std::move(source), dtype);
    if (is_later) return deferred_from(tensor.sizes, tensor.strides, dtype, options_.device, std::move(read));
    const at::Tensor values = at::empty_strided(tensor.sizes, tensor.strides, at::TensorOptions(at::kCPU).dtype(dtype));
    if (values.numel() > 0) read({0, values.numel()}, values.mutable_data_ptr());
    return values.to(options_.device);
  }

  void register_tensor(ExportedProgram::StateTensor& own) {
    if (own.kind == Kind::kHidden) return;
    const auto [module, name] = split_name(own.fqn);
    registering(own.fqn, [&] {
      if (own.kind == Kind::kBuffer) {
        modules_.at(module)->register_buffer(name, own.tensor);
      } else {
        const size_t index = static_cast<size_t>(&own - program_->state.data());
        modules_.at(module)->register_parameter(name, own.tensor, tensors_[index].requires_grad);
      }
    });
  }

  // ---- the graph

  void compile(const json& graph) {
    Compiler::Options options{.namespaces = options_.operator_namespaces,
                              .state = graph_names_,
                              .batch_counters = {},
                              .device_type = device_type(graph),
                              .modes = record_.modes,
                              .is_checkpointed = {}};
    for (size_t i = 0; i < program_->state.size(); ++i) {
      const auto [module, name] = split_name(program_->state[i].fqn);
      if (name == "num_batches_tracked") options.batch_counters[i] = module;
    }
    const std::set<std::string> chosen = checkpointed_modules();
    if (options_.checkpointed) options.is_checkpointed = [&](const std::string& fqn) { return chosen.contains(fqn); };
    Compiler compiler(std::move(options));
    program_->graph = compiler.compile(graph);
    trained_ = compiler.trained_modules();
    random_ = compiler.random_modules();
    for (const auto& trained : trained_) program_->trained_modules.push_back(&module_named(trained.fqn));
  }

  std::set<std::string> checkpointed_modules() const {
    std::set<std::string> chosen;
    if (!options_.checkpointed) return chosen;
    for (const auto& [fqn, module] : modules_) {
      int64_t numel = 0;
      for (const at::Tensor& parameter : module->parameters()) numel += parameter.numel();
      if (!fqn.empty() && options_.checkpointed(fqn, *module, numel)) chosen.insert(fqn);
    }
    if (chosen.empty()) throw ExportedError("ExportedOptions::checkpointed names no module of the model");
    return chosen;
  }

  // Returns the device type of the export: "cpu" if there is no other. Throws if there are two types besides the CPU.
  static std::string device_type(const json& graph) {
    std::string found = "cpu";
    for (const auto& [name, meta] : object_field(graph, "tensor_values").items()) {
      const std::string own = text_field(object_field(meta, "device"), "type");
      if (own == "cpu" || own == "meta" || own == found) continue;
      if (found != "cpu") throw ExportedError("it was exported for two devices, " + found + " and " + own);
      found = own;
    }
    return found;
  }

  void read_results(const json& graph_module, const Structure::FieldNames& named_tuples) {
    const json& calls = list_field(graph_module, "module_call_graph");
    program_->results = Structure::parse(text_field(object_field(calls[0], "signature"), "out_spec"), named_tuples);
    const json& signature = object_field(graph_module, "signature");
    size_t leaves = 0;
    for (const json& spec : list_field(signature, "output_specs")) {
      const auto [kind, value] = alternative_of(spec);
      ExportedProgram::Output output;
      if (kind == "user_output" || kind == "loss_output") {
        ++leaves;
      } else if (kind == "buffer_mutation" || kind == "parameter_mutation") {
        const bool is_buffer = kind == "buffer_mutation";
        output = mutation(text_field(value, is_buffer ? "buffer_name" : "parameter_name"));
        if (is_buffer == (program_->state[output.index].kind == Kind::kParameter))
          throw ExportedError("it changes '" + program_->state[output.index].fqn + "' as a " +
                              (is_buffer ? "buffer" : "parameter") + ", which it is not");
      } else if (kind == "user_input_mutation") {
        output.kind = ExportedProgram::OutputKind::kInput;
        output.index = user_input_named(signature, text_field(value, "user_input_name"));
      } else {
        throw ExportedError("an output is of the kind '" + kind + "', which is not supported");
      }
      program_->outputs.push_back(output);
    }
    if (leaves != program_->results.leaf_count() || program_->outputs.size() != program_->graph->outputs.size())
      throw ExportedError("its outputs do not fit their structure");
  }

  ExportedProgram::Output mutation(const std::string& fqn) const {
    for (size_t i = 0; i < program_->state.size(); ++i) {
      if (program_->state[i].fqn != fqn) continue;
      const auto [module, name] = split_name(fqn);
      const bool counts =
          name == "num_batches_tracked" &&
          std::ranges::any_of(trained_, [own = module](const Compiler::TrainedModule& m) { return m.fqn == own; });
      return {ExportedProgram::OutputKind::kState, i, counts ? modules_.at(module) : nullptr};
    }
    throw ExportedError("it changes '" + fqn + "', which it does not have");
  }

  size_t user_input_named(const json& signature, const std::string& name) const {
    size_t index = 0;
    for (const json& spec : list_field(signature, "input_specs")) {
      const auto [kind, value] = alternative_of(spec);
      if (kind == "constant_input") ++index;
      if (kind != "user_input") continue;
      const json& argument = field(value, "arg");
      if (alternative_of(argument).kind == "as_tensor" && name_of_value(argument) == name) return index;
      ++index;
    }
    throw ExportedError("it changes the input '" + name + "', which it does not have");
  }

  // Sets the modules' modes to those of the export. Starts with outer modules, because train() also changes inner ones.
  void set_modes() {
    const auto trains = [](const auto& m) { return m.was_training; };
    modules_.at("")->train(record_.modes ? record_.modes->training
                                         : trained_.empty() || std::ranges::any_of(trained_, trains));
    if (record_.modes)
      for (const auto& [fqn, is_training] : record_.modes->pinned)
        if (const auto own = modules_.find(fqn); own != modules_.end()) own->second->train(is_training);
    auto ordered = trained_;
    auto depth = [](const auto& m) { return m.fqn.empty() ? 0 : 1 + std::ranges::count(m.fqn, '.'); };
    std::ranges::stable_sort(ordered, [&](const auto& a, const auto& b) { return depth(a) < depth(b); });
    for (const auto& trained : ordered)
      if (modules_.at(trained.fqn)->is_training() != trained.was_training)
        modules_.at(trained.fqn)->train(trained.was_training);
    fix_modes();
  }

  void fix_modes() {
    std::map<std::string, std::string> fixed = record_.modes ? record_.modes->fixed : decltype(record_.modes->fixed)();
    if (!record_.modes && !options_.unchecked)
      for (const auto& [fqn, name] : random_)
        fixed[fqn] =
            name +
            " draws numbers in either mode, and nobody has compared that with Python, as tools/export_model.py "
            "does; ExportedOptions::unchecked takes it as it is";
    for (const auto& trained : trained_)
      if (!trained.why_fixed.empty()) fixed.emplace(trained.fqn, trained.why_fixed);
    for (const auto& [fqn, why] : fixed) {
      const auto module = modules_.find(fqn);
      if (module == modules_.end()) throw ExportedError("it has no module '" + fqn + "'");
      program_->fixed_modules.push_back({module->second, fqn, module->second->is_training(), why});
    }
  }

  const Archive archive_;
  const ExportRecord record_;
  const ExportedOptions& options_;
  std::unique_ptr<ExportedProgram> program_;
  StorageReader storages_;
  std::string model_;
  bool is_user_input_ = false;
  std::map<std::string, std::string> classes_;
  std::map<std::string, torch::nn::Module*> modules_;
  std::map<std::string, size_t> graph_names_;  // from names of graph inputs to indices in the state
  std::vector<ExportedTensor> tensors_;        // the description of each tensor of the state
  std::optional<WeightFiles> files_;
  std::vector<std::string> absent_;
  std::vector<Compiler::TrainedModule> trained_;
  std::map<std::string, std::string> random_;  // the result of Compiler::random_modules()
};

}  // namespace
}  // namespace tessera::internal

namespace tessera {
using namespace internal;

// ---- the module ---------------------------------------------------------------------------------

ExportedModule::ExportedModule(const std::filesystem::path& archive, const ExportedOptions& options)
    : torch::nn::Module("ExportedModule") {
  require_training_dtype("ExportedOptions::parameter_dtype", options.parameter_dtype);
  try {
    program_ = ProgramBuilder(archive, options, *this).build();
  } catch (const ExportedError& error) {
    const std::string what = error.what();
    throw ExportedError(what.starts_with(archive.string()) ? what : archive.string() + ": " + what);
  }
}

ExportedModule::~ExportedModule() = default;

ExportedValue ExportedModule::run(const ExportedInputs& inputs) { return program_->run(inputs); }

std::vector<std::string> ExportedModule::input_names() const { return program_->inputs->names(); }

NamedInputs ExportedModule::example_inputs(int64_t batch, int64_t sequence) const {
  return program_->inputs->zeros(batch, sequence);
}

std::string ExportedModule::describe() const {
  std::ostringstream text;
  text << program_->inputs->describe();
  for (const auto& [name, count] : program_->classes) text << count << " x " << name << "\n";
  return text.str();
}

int64_t ExportedModule::weight_bytes_read() const { return *program_->bytes_read; }

// Returns the parameters that the graph uses only as weights of aten::linear. Does not check for tied tensors.
std::vector<LinearWeight> ExportedModule::linear_weights() {
  const std::vector<bool> is_weight = used_by_linear_alone(*program_->graph, program_->state.size());
  std::map<std::string, torch::nn::Module*> modules{{"", this}};
  for (const auto& item : named_modules("", /*include_self=*/false)) modules[item.key()] = item.value().get();
  std::vector<LinearWeight> found;
  for (size_t i = 0; i < program_->state.size(); ++i) {
    ExportedProgram::StateTensor& own = program_->state[i];
    if (!is_weight[i] || own.kind != ExportedProgram::Kind::kParameter) continue;
    const auto [module, name] = split_name(own.fqn);
    found.push_back({modules.at(module), own.fqn, name, &own.tensor});
  }
  return found;
}

void ExportedModule::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(device, dtype, non_blocking);
  program_->move_hidden(device);
  program_->convert_hidden(dtype);
}

void ExportedModule::to(torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
  program_->convert_hidden(dtype);
}

void ExportedModule::to(torch::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  program_->move_hidden(device);
}

std::shared_ptr<ExportedModule> load_exported(const std::filesystem::path& archive, const ExportedOptions& options) {
  return std::make_shared<ExportedModule>(archive, options);
}

WrapPolicy wrap_classes(std::vector<std::string> classes) {
  if (classes.empty()) throw std::invalid_argument("wrap_classes: no class is named");
  return [classes = std::move(classes)](const std::string&, const torch::nn::Module& module, int64_t) {
    const std::string& own = module.name();
    return std::ranges::any_of(classes, [&](const std::string& name) {
      return own == name ||
             (own.size() > name.size() && own.ends_with(name) && own[own.size() - name.size() - 1] == '.');
    });
  };
}

}  // namespace tessera
