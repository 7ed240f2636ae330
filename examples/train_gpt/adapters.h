#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include <tessera/communicator.h>
#include "gpt.h"
#include "options.h"
#include "trainable.h"

namespace train_gpt {

// Finetuning with --lora: adapters are trained beside the linear layers of a model whose own weights stay, in 4 or 8
// bit with --quantize (include/tessera/quantize_linears.h).

// Brings the weights of --import-gpt2 into a model that is not wrapped, since it is whole weights that are quantized:
// each rank has them for that time. Collective. Throws tessera::CheckpointError for files that do not fit.
void load_base(Gpt& model, const TrainOptions& options, tessera::Communicator& comm);

// Freezes the model, with adapters beside the blocks' linear layers, drawn from torch's generator.
void add_adapters(Gpt& model, const TrainOptions& options);

// Elements of the parameters that are trained. Of the model before it is wrapped.
int64_t trained_numel(const Gpt& model);

// export_gpt2() of such a model, with the adapters in its weights. Collective; every rank has the whole model for that
// time, and rank 0 writes it. `model` is what was wrapped. Throws tessera::CheckpointError.
void export_with_adapters(const std::filesystem::path& directory, Gpt& model, Trainable& trained,
                          tessera::Communicator& comm);

}  // namespace train_gpt
