#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include <tessera/model/model_shards.h>
#include "core/layout/unit_plan.h"
#include "options.h"

namespace train_step {

// A model with its loss: maps inputs and targets to a scalar. All models have this type, so each wrapper is one type.
class ModelImpl : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& inputs, const at::Tensor& targets) = 0;
};
using Model = std::shared_ptr<ModelImpl>;

struct Batch {
  at::Tensor inputs, targets;
};

// Builds the model with torch's initial values, which set_values() must replace. May be called in deferred().
Model make_model(const Options& options);

// Sets the elements of this rank's shards to hashes of the parameter's position in the module and the element's index.
// bench/compare/models.py computes the same values. So both programs start with equal parameters, although their random
// generators differ.
void set_values(const Options& options, const std::vector<tessera::NamedShard>& shards);

// Returns the batch of `rank`, which also consists of hashes. Is the same in each step.
Batch make_batch(const Options& options, int rank);

// Returns the units, as in bench/compare: blocks for gpt, --unit for an archive, linear layers for the other models.
tessera::WrapPolicy units_of(const Options& options);

// Returns a number in [-1, 1): an integer hash of `stream` and `index`.
double hashed(int64_t stream, int64_t index);

}  // namespace train_step
