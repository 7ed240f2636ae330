#include "tessera/flat/backward_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera {

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

struct BackwardPass::Token {
  explicit Token(std::weak_ptr<BackwardPass> owner) : pass(std::move(owner)) {}
  ~Token() {
    if (is_over) return;
    if (const auto owner = pass.lock()) owner->events_.failed();  // which promises not to throw
  }
  const std::weak_ptr<BackwardPass> pass;
  bool is_over = false;
};

bool BackwardPass::enter() {
  if (is_running()) return false;
  auto token = std::make_shared<Token>(weak_from_this());
  token_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([token = std::move(token)] {
    token->is_over = true;
    if (const auto pass = token->pass.lock()) {
      pass->token_.reset();
      pass->events_.ended();
    }
  });
  return true;
}

}  // namespace tessera
