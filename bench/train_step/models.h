#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include <tessera/model/model_shards.h>
#include "core/layout/unit_plan.h"
#include "options.h"

namespace train_step {

// A model with its loss: maps [batch, ...] and targets to a scalar. One type for all models needs one type of wrapper.
class ModelImpl : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& inputs, const at::Tensor& targets) = 0;
};
using Model = std::shared_ptr<ModelImpl>;

struct Batch {
  at::Tensor inputs, targets;
};

// Builds the model with torch's initial values; call set_values() next. May be called in deferred().
Model make_model(const Options& options);

// Sets every parameter to a function of (its position in the module, index of the element), which
// bench/compare/models.py implements too. Both programs start from equal values, whatever their generators. Writes only
// this rank's shards.
void set_values(const Options& options, const std::vector<tessera::NamedShard>& shards);

// This rank's data, by the same function; equal in each step.
Batch make_batch(const Options& options, int rank);

// The units, as in Python's programs: a block of gpt, --unit of an archive, each linear layer of the other models.
tessera::WrapPolicy units_of(const Options& options);

// Element `index` of stream `stream`: a number in [-1, 1), from an integer hash.
double hashed(int64_t stream, int64_t index);

}  // namespace train_step
