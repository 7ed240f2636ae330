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
#include <tessera/exported_value.h>
#include <tessera/wrap.h>

namespace tessera {

// Where the values of an exported model come from, and where they go.
struct ExportedOptions {
  // Where parameters and buffers are, and every device in the archive becomes.
  at::Device device = at::kCPU;

  // A safetensors file, an index (model.safetensors.index.json) or a folder of them; symbolic links are followed.
  // Empty: the archive's own values. Names that the files do not have come from the archive or from `init`.
  std::filesystem::path weights{};
  // The name in those files of what the model calls `fqn`; empty: the same name.
  std::function<std::string(const std::string& fqn)> weight_name{};
  // true: throws for names in the files that the model does not have.
  bool strict = true;

  // Fills, under NoGradGuard, each parameter and buffer that neither the files nor the archive (exported on meta) have
  // values of.
  std::function<void(const std::string& fqn, at::Tensor& tensor)> init{};

  // Of floating-point parameters; empty: as exported. kFloat with a model that was exported in bfloat16 and
  // MixedPrecision::param_dtype = kBFloat16 keeps full precision where optimizers work.
  std::optional<at::ScalarType> parameter_dtype{};

  // Modules (not the root) whose activations are computed again in backward, as checkpointed() does.
  WrapPolicy checkpointed{};

  // Namespaces of operators, beside "aten", that the archive may use: of libraries that this program links.
  std::vector<std::string> operator_namespaces{};

  // true: takes for right what tools/export_model.py would have compared with Python, in archives of others: gradients
  // of decomposed programs, eval() of models with random operators, ties of tensors without values; and leaves out
  // guards that cannot be read. Without it such archives, or calls, are refused, or warned of where nothing shows that
  // anything is wrong.
  bool unchecked = false;
};

namespace internal {
class ExportedProgram;
}

// A model that Python exported (torch.export.save), to be trained: its modules, by their names in Python, hold the
// parameters and buffers; forward() calls the archive's operators one after the other through libtorch's dispatcher, so
// that autograd and paging see what they see of any other module.
//
//   auto model = tessera::load_exported("llama.pt2");
//   auto out = model->forward(tessera::NamedInputs{{"input_ids", ids}, {"labels", labels}});
//   out["loss"].tensor().backward();
//
// Modules have their Python class's name as name(). train() and eval() switch dropout and batch norm, of one module or
// of all; a model begins in the mode in which it was exported. Python's code that did something else in eval() than in
// train() did so when it was exported, for good: forward() in the other mode is refused by the module's name.
// Persistent buffers are buffers(); others, and constants, are not, so that what is saved has the names of Python's
// state_dict().
class ExportedModule : public torch::nn::Module, public internal::HasLinearWeights {
 public:
  // Reads the archive.
  ExportedModule(const std::filesystem::path& archive, const ExportedOptions& options);
  ~ExportedModule() override;

  // Inputs by position, and after them any by name (NamedInputs): tensors, numbers, None (std::nullopt, an undefined
  // tensor), and vectors or ExportedValues of these. Returns what Python's forward() returns, in its structure. Throws
  // std::invalid_argument for inputs for which the model was not exported, by name, and what operators throw, with the
  // node and the line of Python.
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
  // forward() with inputs that are gathered already.
  ExportedValue run(const ExportedInputs& inputs);

  // Names of forward's inputs, in order.
  std::vector<std::string> input_names() const;
  // Inputs of zeros on the CPU, for a call that is only to be measured: InputSignature::zeros().
  NamedInputs example_inputs(int64_t batch = 0, int64_t sequence = 0) const;
  // Inputs with dtypes, shapes and ranges, and the classes of modules with their number: for people.
  std::string describe() const;
  // Bytes of weights that were read from files so far. What is mapped and not deferred is not counted.
  int64_t weight_bytes_read() const;

  // Parameters that the graph uses as weights of aten.linear and for nothing else: what quantize_linears() may take.
  std::vector<internal::LinearWeight> linear_weights() override;

  // As torch::nn::Module's, with the constants that the graph has beside its parameters and buffers.
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

// Reads an archive of torch.export (torch 2.9 to 2.15). The archive is mapped: parameters are its pages until they are
// written to. Inside deferred(), parameters and persistent buffers have no memory yet, and under
// FullyShardedDataParallel each rank reads its part of them and no more, unit by unit:
//
//   auto model = tessera::deferred([] { return tessera::load_exported("llama.pt2", {.weights = "llama/"}); });
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_classes({"LlamaDecoderLayer"})});
//
// Not collective. Throws ExportedError, with the node and the line of Python where it is about one; CheckpointError for
// `weights`. Nothing is unpickled, no library is loaded, no other file is opened.
std::shared_ptr<ExportedModule> load_exported(const std::filesystem::path& archive,
                                              const ExportedOptions& options = {});

// A unit for each module of one of these Python classes: "LlamaDecoderLayer", or with its module in front
// ("transformers.models.llama.modeling_llama.LlamaDecoderLayer"). Also for checkpointing and mixed precision.
WrapPolicy wrap_classes(std::vector<std::string> classes);

}  // namespace tessera
