#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/detail/linear_weights.h>
#include <tessera/exported/value.h>
#include <tessera/wrap.h>

namespace tessera {

// How load_exported() finds the values of a model and where it puts them.
struct ExportedOptions {
  // Device of parameters and buffers; replaces every device in the archive.
  at::Device device = at::kCPU;

  // A safetensors file, an index (model.safetensors.index.json) or a folder of them; follows symbolic links. Empty: the
  // archive's own values. Names that the files lack are taken from the archive or from `init`.
  std::filesystem::path weights{};
  // Maps the model's `fqn` to its name in those files. Empty: names are equal.
  std::function<std::string(const std::string& fqn)> weight_name{};
  // true: throws for names in the files that the model lacks.
  bool strict = true;

  // Called under NoGradGuard for each parameter and buffer without a value in the files or the archive (exported on
  // meta).
  std::function<void(const std::string& fqn, at::Tensor& tensor)> init{};

  // Dtype of floating-point parameters; empty: as exported. For a model exported in bfloat16, kFloat with
  // MixedPrecision::param_dtype = kBFloat16 gives the optimizer full precision.
  std::optional<at::ScalarType> parameter_dtype{};

  // Modules, except the root, whose activations are recomputed in backward, as by checkpointed().
  WrapPolicy checkpointed{};

  // Operator namespaces that the archive may use besides "aten"; the program must link their libraries.
  std::vector<std::string> operator_namespaces{};

  // true: skips comparisons with results that Python recorded (tools/export_model.py): gradients of decomposed
  // programs, eval() of models with random operators, ties of tensors without values. Also ignores unreadable guards
  // and checksums of tensors. false: throws without these records, or warns if nothing indicates an error.
  bool unchecked = false;
};

namespace internal {
class ExportedProgram;
}

// A trainable model that Python exported (torch.export.save). Its modules have their Python names and hold the
// parameters and buffers. forward() runs the archive's operators through libtorch's dispatcher, so autograd and paging
// work as for any module.
//
//   auto model = tessera::load_exported("llama.pt2");
//   auto out = model->forward(tessera::NamedInputs{{"input_ids", ids}, {"labels", labels}});
//   out["loss"].tensor().backward();
//
// name() of a module is its Python class. train() and eval() switch dropout and batch norm, of one module or of all;
// the initial mode is that of the export. Python code that branched on the mode is fixed to that of the export: in the
// other mode forward() throws with the module's name. buffers() has the persistent buffers only, no others and no
// constants, so saved names equal Python's state_dict().
class ExportedModule : public torch::nn::Module, public internal::HasLinearWeights {
 public:
  // Use load_exported().
  ExportedModule(const std::filesystem::path& archive, const ExportedOptions& options);
  ~ExportedModule() override;

  // Takes inputs by position, then by name (NamedInputs): tensors, numbers, None (std::nullopt or an undefined tensor),
  // and vectors or ExportedValues of these. Returns the value of Python's forward() in its structure. Throws
  // std::invalid_argument that names an input for which the model was not exported; errors of operators get the node
  // and the line of Python.
  template <class... Inputs>
  ExportedValue forward(Inputs&&... inputs) {
    ExportedInputs given;
    (add(given, std::forward<Inputs>(inputs)), ...);
    return run(given);
  }
  template <class... Inputs>
  ExportedValue operator()(Inputs&&... inputs) {
    return forward(std::forward<Inputs>(inputs)...);
  }
  // Like forward(), for collected inputs.
  ExportedValue run(const ExportedInputs& inputs);

  // Names of forward's inputs, in order.
  std::vector<std::string> input_names() const;
  // Inputs of zeros on the CPU for a dry run: InputSignature::zeros().
  NamedInputs example_inputs(int64_t batch = 0, int64_t sequence = 0) const;
  // A text with the inputs' dtypes, shapes and ranges, and the number of modules of each class.
  std::string describe() const;
  // Bytes of weights read from files so far, without weights of the archive that are not deferred.
  int64_t weight_bytes_read() const;

  // Parameters that the graph uses only as weights of aten.linear, for quantize_linears().
  std::vector<internal::LinearWeight> linear_weights() override;

  // Like torch::nn::Module::to(); also converts the graph's constants.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 private:
  template <class Input>
  static void add(ExportedInputs& inputs, Input&& input) {
    if constexpr (std::is_same_v<std::decay_t<Input>, NamedInputs>) {
      inputs.add(input);
    } else {
      inputs.add(ExportedValue(std::forward<Input>(input)));
    }
  }
  std::unique_ptr<internal::ExportedProgram> program_;
};

// Loads an archive of torch.export (torch 2.9 to 2.15). Maps the archive into memory: parameters share its pages until
// they are written to. Inside deferred(), parameters and persistent buffers have no memory yet; under
// FullyShardedDataParallel each rank then reads only its shards, unit by unit:
//
//   auto model = tessera::deferred([] { return tessera::load_exported("llama.pt2", {.weights = "llama/"}); });
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_classes({"LlamaDecoderLayer"})});
//
// Not collective. Throws ExportedError, for a node with the line of Python; CheckpointError for `weights`. Never
// unpickles, loads a library, or opens another file.
std::shared_ptr<ExportedModule> load_exported(const std::filesystem::path& archive,
                                              const ExportedOptions& options = {});

// Selects the modules of these Python classes: "LlamaDecoderLayer", or qualified
// ("transformers.models.llama.modeling_llama.LlamaDecoderLayer"). Also for checkpointing and mixed precision.
WrapPolicy wrap_classes(std::vector<std::string> classes);

}  // namespace tessera
