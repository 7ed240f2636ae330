#pragma once

#include <filesystem>

#include <tessera/model_shards.h>
#include "gpt.h"

namespace train_gpt {

// Weights in the names and layout of Hugging Face's GPT2LMHeadModel: a directory with config.json and
// model.safetensors. Its linear layers hold transposed weights. Both are collective and throw
// tessera::CheckpointError.

// Writes such a directory from a model, however it is sharded. Rank 0 translates, tensor by tensor.
void export_gpt2(const std::filesystem::path& directory, tessera::ModelShards& model, const GptOptions& options);

// Loads one, also several files with an index, of any floating dtype. Each rank reads its own part; nothing is written.
// What config.json says that shapes do not show must be the model's, as read_gpt2_options() gives it.
void import_gpt2(const std::filesystem::path& directory, tessera::ModelShards& model, const GptOptions& options);

// What config.json says. Throws tessera::CheckpointError for another kind of model.
GptOptions read_gpt2_options(const std::filesystem::path& directory);

}  // namespace train_gpt
