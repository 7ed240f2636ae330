#pragma once

#include <memory>

#include <tessera/communicator.h>
#include "gpt.h"
#include "options.h"
#include "trainable.h"

namespace train_gpt {

// The model whole, its values drawn from --seed: the same on every rank. Not collective; ranks may be threads.
Gpt draw_model(const TrainOptions& options, at::Device device);

// add_adapters(), drawn likewise.
void draw_adapters(Gpt& model, const TrainOptions& options);

// The model with its optimizer, as --wrapper, --offload and --optimizer say. Collective.
std::unique_ptr<Trainable> wrap(Gpt model, const TrainOptions& options, std::shared_ptr<tessera::Communicator> comm);

}  // namespace train_gpt
