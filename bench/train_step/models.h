#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include <tessera/model_shards.h>
#include "core/layout/unit_plan.h"
#include "options.h"

namespace train_step {

// A model with its loss, so that one wrapper type serves all: [batch, ...] and targets to a scalar.
class ModelImpl : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& inputs, const at::Tensor& targets) = 0;
};
using Model = std::shared_ptr<ModelImpl>;

struct Batch {
  at::Tensor inputs, targets;
};

// With whatever values torch's constructors give; set_values() follows. May be called in deferred().
Model make_model(const Options& options);

// Gives every parameter values that are a function of (its place in the module, index of the element):
// the same in any program that knows the function (bench/compare/models.py), whatever its generators.
// Writes to what this rank holds, so that nothing has to be whole.
void set_values(const Options& options, const std::vector<tessera::NamedShard>& shards);

// The part of the data that `rank` has; the same in each step, and by the same function.
Batch make_batch(const Options& options, int rank);

// A wrapper's units, as Python's programs wrap too: a block of gpt, --unit of an archive, each linear layer of the
// others.
tessera::WrapPolicy units_of(const Options& options);

// Element `index` of stream `stream`: a number of [-1, 1), by an integer hash.
double hashed(int64_t stream, int64_t index);

}  // namespace train_step
