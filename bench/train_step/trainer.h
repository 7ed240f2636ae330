#pragma once

#include <memory>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/data_parallel.h>
#include <tessera/model/model_shards.h>
#include "models.h"
#include "options.h"

namespace train_step {

// A model and its optimizer under one of the wrappers.
class Trainer {
 public:
  virtual ~Trainer() = default;
  // Runs forward, backward and one step of the optimizer, and returns the loss. Does not clear the gradients.
  virtual at::Tensor step(const Batch& batch) = 0;
  virtual void zero_grad() = 0;
  virtual tessera::MemoryReport memory() const = 0;
  virtual std::vector<tessera::NamedShard> shards() const = 0;
  // Returns the bytes of this rank's optimizer state.
  virtual int64_t optimizer_bytes() = 0;
  // Returns the sum of all parameters, in double and in the module's order, so that equal parameters give equal sums.
  // Collective, except for the wrapper "local". Allocates memory for the whole model.
  virtual double parameter_sum() = 0;
};

// Builds a model, sets its values by set_values(), and wraps it. Collective, except for the wrapper "local".
std::unique_ptr<Trainer> make_trainer(const Options& options, const std::shared_ptr<tessera::Communicator>& comm);

}  // namespace train_step
