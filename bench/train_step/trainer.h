#pragma once

#include <memory>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/memory_report.h>
#include <tessera/model_shards.h>
#include "models.h"
#include "options.h"

namespace train_step {

// A model and its optimizer under one of the wrappers.
class Trainer {
 public:
  virtual ~Trainer() = default;
  // Loss of the batch, its gradients, one step of the optimizer; gradients stay. Returns the loss.
  virtual at::Tensor step(const Batch& batch) = 0;
  virtual void zero_grad() = 0;
  virtual tessera::MemoryReport memory() const = 0;
  virtual std::vector<tessera::NamedShard> shards() const = 0;
  // What this rank holds of the optimizer's state.
  virtual int64_t optimizer_bytes() = 0;
  // Over all parameters, in double, in the module's order, so that equal parameters give equal sums.
  // Collective, but with the wrapper "local". Takes the memory of the whole model.
  virtual double parameter_sum() = 0;
};

// Collective, but with the wrapper "local". Values are those of set_values().
std::unique_ptr<Trainer> make_trainer(const Options& options, const std::shared_ptr<tessera::Communicator>& comm);

}  // namespace train_step
