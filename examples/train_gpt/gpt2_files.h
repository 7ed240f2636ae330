#pragma once

#include <filesystem>

#include "gpt.h"
#include "tessera/flat/model_shards.h"

namespace train_gpt {

// Weights in the names and layout of Hugging Face's GPT2LMHeadModel: a directory with config.json and
// model.safetensors. Its linear layers hold transposed weights. Both are collective; rank 0 translates
// tensor by tensor, beside the directory, and each rank writes or reads its own part. Throw
// tessera::CheckpointError.

// Writes such a directory from a model, however it is sharded.
void export_gpt2(const std::filesystem::path& directory, tessera::ModelShards& model, const GptOptions& options);

// Loads one, also several files with an index. The sizes and the number of heads must be the model's.
void import_gpt2(const std::filesystem::path& directory, tessera::ModelShards& model, const GptOptions& options);

// What config.json says. Throws tessera::CheckpointError for another kind of model.
GptOptions read_gpt2_options(const std::filesystem::path& directory);

}  // namespace train_gpt
