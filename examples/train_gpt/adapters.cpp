#include "adapters.h"

#include <string>

#include <tessera/quantize_linears.h>
#include "gpt2_files.h"
#include "local.h"

namespace train_gpt {
namespace {

tessera::WeightFormat format_of(BaseFormat base) {
  switch (base) {
    case BaseFormat::kNf4:
      return tessera::WeightFormat::kNf4Double;
    case BaseFormat::kInt8:
      return tessera::WeightFormat::kInt8;
    default:
      return tessera::WeightFormat::kFull;
  }
}

// A group of this rank alone, for files that it reads or writes whole.
std::shared_ptr<tessera::Communicator> alone(tessera::Communicator& comm) {
  return comm.split_by([](int rank) { return rank; });
}

}  // namespace

void load_base(Gpt& model, const TrainOptions& options, tessera::Communicator& comm) {
  WholeModel whole(model, alone(comm));
  import_gpt2(options.import_gpt2, whole, options.model);
}

void add_adapters(Gpt& model, const TrainOptions& options) {
  // Adapters add twice what they compute, whatever their rank, as QLoRA's examples have it. The head stays as it is, as
  // it does in Python: its errors would be the logits' own.
  const auto rank = static_cast<double>(options.lora_rank);
  tessera::quantize_linears(*model, {.format = format_of(options.base),
                                     .lora = {.rank = options.lora_rank, .alpha = 2.0 * rank},
                                     .which = tessera::wrap_if([](const std::string& fqn, const torch::nn::Module&) {
                                       return fqn.starts_with("blocks.");
                                     })});
}

int64_t trained_numel(const Gpt& model) {
  int64_t numel = 0;
  for (const auto& parameter : model->parameters()) numel += parameter.requires_grad() ? parameter.numel() : 0;
  return numel;
}

void export_with_adapters(const std::filesystem::path& directory, Gpt& model, Trainable& trained,
                          tessera::Communicator& comm) {
  const torch::NoGradGuard no_grad;
  const auto state = tessera::dequantized_state(*model, trained.full_state());
  const auto own = alone(comm);
  if (comm.rank() == 0) {
    Gpt plain(model->options());
    for (auto& item : plain->named_parameters()) item.value().copy_(state[item.key()]);
    WholeModel whole(plain, own);
    export_gpt2(directory, whole, model->options());
  }
  comm.barrier("the export");
}

}  // namespace train_gpt
