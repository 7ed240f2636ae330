#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/detail/linear_weights.h>
#include <tessera/exported/value.h>
#include <tessera/wrap.h>

namespace tessera {

// Options of load_exported().
struct ExportedOptions {
  // Device of parameters and buffers; replaces every device in the archive.
  at::Device device = at::kCPU;

  // The files with the values: a safetensors file, an index (model.safetensors.index.json), or a folder of such files.
  // Follows symbolic links. Values that the files lack come from the archive or from `init`. Empty: no files.
  std::filesystem::path weights{};
  // Maps a tensor's name in the model, `fqn`, to its name in the files of `weights`. Empty: names are equal.
  std::function<std::string(const std::string& fqn)> weight_name{};
  // true: throws ExportedError if the files of `weights` have names that the model lacks. false: ignores such names.
  bool strict = true;

  // Sets a parameter or buffer that has no value in the files or the archive (exported on meta). Called under
  // NoGradGuard. Empty: load_exported() throws ExportedError for such tensors.
  std::function<void(const std::string& fqn, at::Tensor& tensor)> init{};

  // Dtype of floating-point parameters; empty: as exported. For a model exported in bfloat16, kFloat with
  // MixedPrecision::param_dtype = kBFloat16 gives the optimizer full precision.
  std::optional<at::ScalarType> parameter_dtype{};

  // Selects modules whose activations are recomputed in backward, as by checkpointed(). Never applies to the root.
  WrapPolicy checkpointed{};

  // Operator namespaces that the archive may use besides "aten"; the program must link their libraries.
  std::vector<std::string> operator_namespaces{};

  // tools/export_model.py checks gradients of decomposed programs, random operators, and ties of tensors without
  // values, and records the results in the archive. false: if a record is missing, loading warns or throws, or modules
  // keep the mode of export. true: ignores missing records, guards that cannot be parsed, and checksums.
  bool unchecked = false;
};

namespace internal {
class ExportedProgram;
}

// A trainable model that Python exported (torch.export.save). Its modules have their Python names, and hold the
// parameters and buffers. forward() runs the archive's operators through libtorch's dispatcher, so autograd and
// sharding work as for any module.
//
//   auto model = tessera::load_exported("llama.pt2");
//   auto out = model->forward(tessera::NamedInputs{{"input_ids", ids}, {"labels", labels}});
//   out["loss"].tensor().backward();
//
// A submodule's name() is its Python class, or "Module" if Python's forward() did not call the submodule. train() and
// eval() of one or all modules switch dropout and batch norm. The initial mode is the mode at export. If Python code
// branched on a module's mode, that mode is fixed: in the other mode, forward() throws with the module's name.
// buffers() returns only the persistent buffers, without constants. So saved names equal those of Python's
// state_dict().
class ExportedModule : public torch::nn::Module, public internal::HasLinearWeights {
 public:
  // Programs should call load_exported() instead.
  ExportedModule(const std::filesystem::path& archive, const ExportedOptions& options);
  ~ExportedModule() override;

  // Takes inputs by position, then by name (NamedInputs). An input is a tensor, a number, None (std::nullopt or an
  // undefined tensor), or a vector or ExportedValue of these. Returns the result of Python's forward(), with the same
  // structure. If the model was not exported for an input's type, shape or value, throws std::invalid_argument with the
  // input's name. Errors of operators name the node and its line of Python.
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
  ExportedValue run(const ExportedInputs& inputs);  // like forward(), for collected inputs

  std::vector<std::string> input_names() const;  // names of the inputs of forward(), in order
  // Returns inputs of zeros on the CPU, for a dry run. For `batch` or `sequence` 0, uses the size at export.
  NamedInputs example_inputs(int64_t batch = 0, int64_t sequence = 0) const;
  // Returns a text with the inputs' dtypes, shapes and ranges, and the number of modules of each class.
  std::string describe() const;
  // Returns the bytes read so far from files of `weights` and, for deferred tensors, from the archive. Excludes other
  // reads.
  int64_t weight_bytes_read() const;

  // Returns the parameters, tied ones too, that the graph uses only as weights of aten.linear, for quantize_linears().
  std::vector<internal::LinearWeight> linear_weights() override;

  // Like torch::nn::Module::to(). Also moves constants and non-persistent buffers. `dtype` does not convert constants.
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

// Loads an archive of torch.export (torch 2.9 to 2.15), and reads its weights into memory. Never maps the file. Inside
// deferred(), parameters and persistent buffers have no memory yet. Under FullyShardedDataParallel each rank then reads
// only its shards, unit by unit:
//
//   auto model = tessera::deferred([] { return tessera::load_exported("llama.pt2", {.weights = "llama/"}); });
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_classes({"LlamaDecoderLayer"})});
//
// Not collective. Throws ExportedError; the text has the line of Python if the error is in a node. Throws
// CheckpointError for unreadable files of `weights`. Never unpickles, never loads a library, and opens no other files.
std::shared_ptr<ExportedModule> load_exported(const std::filesystem::path& archive,
                                              const ExportedOptions& options = {});

// Returns a policy that selects modules by Python class, for units, checkpointing and mixed precision. Names may be
// short ("LlamaDecoderLayer") or qualified ("transformers.models.llama.modeling_llama.LlamaDecoderLayer").
WrapPolicy wrap_classes(std::vector<std::string> classes);

}  // namespace tessera
