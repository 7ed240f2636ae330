#include "gpt2_files.h"

#include <ATen/core/grad_mode.h>

#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include <tessera/errors.h>
#include <tessera/full_file.h>
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"
#include "checkpoint/save/outcome.h"

namespace train_gpt {
namespace {

namespace fs = std::filesystem;
using tessera::CheckpointError;

constexpr char kWeights[] = "model.safetensors";

struct Translation {
  std::string name;
  bool transposed = false;
};

// Our names to GPT-2's.
std::map<std::string, Translation> gpt2_names(const GptOptions& options) {
  std::map<std::string, Translation> names = {{"token_embedding.weight", {"transformer.wte.weight"}},
                                              {"position_embedding.weight", {"transformer.wpe.weight"}},
                                              {"norm.weight", {"transformer.ln_f.weight"}},
                                              {"norm.bias", {"transformer.ln_f.bias"}}};
  if (!options.tie) names["head.weight"] = {"lm_head.weight"};
  const std::pair<const char*, const char*> norms[] = {{"attention_norm", "ln_1"}, {"mlp_norm", "ln_2"}};
  const std::pair<const char*, const char*> linears[] = {{"attention.qkv", "attn.c_attn"},
                                                         {"attention.projection", "attn.c_proj"},
                                                         {"expand", "mlp.c_fc"},
                                                         {"projection", "mlp.c_proj"}};
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const auto ours = "blocks." + std::to_string(layer) + ".", theirs = "transformer.h." + std::to_string(layer) + ".";
    auto add = [&](const auto& pair, bool transposed) {
      names[ours + pair.first + ".weight"] = {theirs + pair.second + ".weight", transposed};
      names[ours + pair.first + ".bias"] = {theirs + pair.second + ".bias"};
    };
    for (const auto& norm : norms) add(norm, false);
    for (const auto& linear : linears) add(linear, true);
  }
  return names;
}

// Writes `to` with every tensor of `from` under another name, or left out where that is empty.
void translate(const tessera::internal::SavedTensors& from, const fs::path& to,
               const std::function<Translation(const std::string&)>& rename) {
  tessera::internal::SliceReader reader(from);
  std::vector<tessera::FullTensor> tensors;
  std::map<std::string, std::pair<std::string, bool>> sources;
  for (const auto& [name, tensor] : from.tensors) {
    const Translation translation = rename(name);
    if (translation.name.empty()) continue;
    auto shape = tensor.shape;
    if (translation.transposed) {
      if (shape.size() != 2)
        throw CheckpointError("'" + name + "' has " + std::to_string(shape.size()) + " dimensions, expected 2");
      std::swap(shape[0], shape[1]);
    }
    tensors.push_back({translation.name, tensor.dtype, shape, {}});
    sources[translation.name] = {name, translation.transposed};
  }
  tessera::write_full(to, tensors, [&](const tessera::FullTensor& tensor) {
    const auto& [name, transposed] = sources.at(tensor.name);
    const at::Tensor values = reader.read(name, tessera::internal::whole_box(from.tensors.at(name).shape));
    return transposed ? values.t().contiguous() : values;
  });
}

nlohmann::json gpt2_config(const GptOptions& options) {
  return {{"model_type", "gpt2"},
          {"architectures", {"GPT2LMHeadModel"}},
          {"vocab_size", options.vocabulary},
          {"n_positions", options.context},
          {"n_ctx", options.context},
          {"n_embd", options.width},
          {"n_layer", options.layers},
          {"n_head", options.heads},
          {"n_inner", nullptr},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", options.norm_epsilon},
          {"embd_pdrop", 0.0},
          {"attn_pdrop", 0.0},
          {"resid_pdrop", 0.0},
          {"scale_attn_weights", options.scale_attention},
          {"scale_attn_by_inverse_layer_idx", options.scale_attention_by_layer},
          {"tie_word_embeddings", options.tie},
          {"bos_token_id", 0},
          {"eos_token_id", 0}};
}

void on_rank_0(tessera::Communicator& comm, const std::string& what, const std::function<void()>& act) {
  tessera::internal::gather_results(comm, tessera::internal::attempt([&] {
                                      if (comm.rank() == 0) act();
                                      return std::string();
                                    }),
                                    what);
}

// A translated copy beside the directory, gone afterwards.
class Draft {
 public:
  Draft(const fs::path& directory, tessera::Communicator& comm)
      : comm_(comm), path_(directory / "tessera-draft.safetensors") {}
  ~Draft() {
    std::error_code ignored;
    if (comm_.rank() == 0) fs::remove(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  tessera::Communicator& comm_;
  fs::path path_;
};

}  // namespace

void export_gpt2(const fs::path& directory, tessera::ModelShards& model, const GptOptions& options) {
  const at::NoGradGuard no_grad;
  auto& comm = *model.comm();
  const Draft draft(directory, comm);
  tessera::save_full(draft.path(), model);
  on_rank_0(comm, "exporting to " + directory.string(), [&] {
    const auto names = gpt2_names(options);
    translate(tessera::internal::find_full_tensors(draft.path()), directory / kWeights,
              [&](const std::string& name) { return names.at(name); });
    std::ofstream config(directory / "config.json");
    config << gpt2_config(options).dump(2) << std::endl;
    if (!config) throw CheckpointError((directory / "config.json").string() + " cannot be written");
  });
}

GptOptions read_gpt2_options(const fs::path& directory) {
  std::ifstream file(directory / "config.json");
  const std::string where = (directory / "config.json").string();
  if (!file) throw CheckpointError(where + " cannot be read");
  const auto config = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object() || config.value("model_type", "") != "gpt2")
    throw CheckpointError(where + " is not that of a GPT-2");
  const auto activation = config.value("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
    throw CheckpointError(where + ": the activation '" + activation + "' is not this model's gelu_new");
  GptOptions options;
  try {
    options.vocabulary = config.at("vocab_size");
    options.layers = config.at("n_layer");
    options.width = config.at("n_embd");
    options.heads = config.at("n_head");
    options.context = config.at("n_positions");
    options.tie = config.value("tie_word_embeddings", true);
    options.norm_epsilon = config.value("layer_norm_epsilon", 1e-5);
    options.scale_attention = config.value("scale_attn_weights", true);
    options.scale_attention_by_layer = config.value("scale_attn_by_inverse_layer_idx", false);
    if (const auto inner = config.find("n_inner");
        inner != config.end() && !inner->is_null() && *inner != 4 * options.width)
      throw CheckpointError(where + ": n_inner is " + inner->dump() + ", this model has 4 * n_embd");
    if (config.value("add_cross_attention", false))
      throw CheckpointError(where + ": add_cross_attention is true, this model has no cross-attention");
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointError(where + ": " + error.what());
  }
  return options;
}

void import_gpt2(const fs::path& directory, tessera::ModelShards& model, const GptOptions& options) {
  const GptOptions theirs = read_gpt2_options(directory);
  auto check = [&](const char* what, auto other, auto own) {
    if (other != own)
      throw CheckpointError(directory.string() + ": " + what + " is " + nlohmann::json(other).dump() +
                            ", the model's " + nlohmann::json(own).dump());
  };
  check("n_head", theirs.heads, options.heads);  // which no shape shows
  check("layer_norm_epsilon", theirs.norm_epsilon, options.norm_epsilon);
  check("scale_attn_weights", theirs.scale_attention, options.scale_attention);
  check("scale_attn_by_inverse_layer_idx", theirs.scale_attention_by_layer, options.scale_attention_by_layer);
  if (options.tie) check("tie_word_embeddings", theirs.tie, true);  // its head would be left out
  std::map<std::string, Translation> ours;
  for (const auto& [own, translation] : gpt2_names(options)) ours[translation.name] = {own, translation.transposed};
  // Files of the bare GPT2Model lack the prefix, old ones hold the causal mask, and a tied head is the embedding.
  auto translated = [&](const std::string& name) -> Translation {
    const std::string full =
        name.starts_with("transformer.") || name == "lm_head.weight" ? name : "transformer." + name;
    if (full.ends_with(".attn.bias") || full.ends_with(".attn.masked_bias")) return {};
    if (full == "lm_head.weight" && options.tie) return {};
    const auto found = ours.find(full);
    return found == ours.end() ? Translation{name} : found->second;  // load_full lists what is not known
  };
  const fs::path index = directory / (std::string(kWeights) + ".index.json");
  tessera::load_full(fs::exists(index) ? index : directory / kWeights, model,
                     {.rename = [&](const std::string& name) { return translated(name).name; },
                      .transposed = [&](const std::string& name) { return translated(name).transposed; },
                      .convert_dtypes = true});
}

}  // namespace train_gpt
