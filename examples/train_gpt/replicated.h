#pragma once

#include <memory>
#include <vector>

#include "local.h"
#include "tessera/comm/communicator.h"

namespace train_gpt {

// Data-parallel training without sharding: every rank holds everything, starts from rank 0's
// parameters, and averages its gradients with the others' after each backward pass.
//
// The gradients are views of a few flat buckets, made once, so that each is reduced in one
// collective and nothing is copied.
class ReplicatedModel final : public LocalModel {
 public:
  ReplicatedModel(Gpt model, std::shared_ptr<tessera::Communicator> comm);

  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override;
  void zero_grad() override;
  std::string describe() const override;

 private:
  void make_buckets();
  void average_gradients();

  std::shared_ptr<tessera::Communicator> comm_;
  std::vector<at::Tensor> buckets_;  // 1-D
};

}  // namespace train_gpt
