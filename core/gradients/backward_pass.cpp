#include "core/gradients/backward_pass.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include "core/layout/shard_mark.h"
#include "core/runtime/quiet.h"

namespace tessera::internal {

namespace {

using torch::autograd::Engine;
using NodePointer = decltype(torch::autograd::Edge::function);  // libtorch 2.15 has its own kind

// libtorch's engine, which refuses to be asked for gradients of shards. It would find no way to them, and do nothing.
class AskedEngine : public Engine {
 public:
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    for (const torch::autograd::Edge& asked : outputs) {
      const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(asked.function.get());
      if (leaf != nullptr && is_shard(leaf->variable))
        throw std::logic_error("backward() or torch::autograd::grad() was asked for a gradient of the shard of " +
                               shard_label(leaf->variable) +
                               ", one of fsdp.parameters(), which no forward uses: ask for that of the module's own "
                               "parameter, or call backward() without inputs");
    }
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
};

// The same, in which a pass that fails is known to have failed before the caller of backward() is told. The
// engine's thread for a device lets go of the pass when it likes, after the caller has gone on: what the end of a
// failed pass does to gradients would come after the caller's zero_grad().
class PunctualEngine final : public AskedEngine {
 public:
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task, const NodePointer& node,
                           std::exception& error) override {
    std::vector<std::function<void()>> dropped;
    {
      std::lock_guard lock(task->final_callbacks_lock_);
      dropped.swap(task->final_callbacks_);
    }
    dropped.clear();  // with their tokens
    Engine::thread_on_exception(task, node, error);
  }
};

// CPUs have no threads of the engine's.
Engine& engine() {
  static AskedEngine& made = at::globalContext().hasCUDA() ? *new PunctualEngine : *new AskedEngine;
  return made;  // its threads outlive main()
}

// Unless somebody else has put an engine there, Python for one.
[[maybe_unused]] const bool kHasSetEngine = [] {
  const bool is_libtorchs = &Engine::get_default_engine() == &Engine::get_base_engine();
  if (is_libtorchs) torch::autograd::set_default_engine_stub(&engine);
  return is_libtorchs;
}();

}  // namespace

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

struct BackwardPass::Token {
  explicit Token(std::weak_ptr<BackwardPass> owner) : pass(std::move(owner)) {}
  ~Token() {
    if (is_over) return;
    if (const auto owner = pass.lock()) {
      owner->after_failure();  // first: who still reads gradients, which go now
      owner->failed();
    }
  }
  const std::weak_ptr<BackwardPass> pass;
  bool is_over = false;
};

void BackwardPass::enter() {
  if (is_running()) return;
  auto token = std::make_shared<Token>(weak_from_this());
  token_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([token = std::move(token)] {
    token->is_over = true;
    if (const auto pass = token->pass.lock()) pass->ended();
  });
  Quiet quiet;
  recover();
  begin();
}

void BackwardPass::ended() {
  try {
    finish_pass();
  } catch (...) {
    after_failure();
    throw;
  }
}

void BackwardPass::finish_pass() {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  token_.reset();
  try {
    end();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    failed();
    recover();
    throw;
  }
}

void BackwardPass::failed() {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  failed_ = true;
  failed_reducing_ = reduces_;
  fail();
}

void BackwardPass::recover() {
  if (std::exchange(failed_, false)) abandon();
}

Scope BackwardPass::no_sync() {
  const bool before = reduces_;
  set_reduces(false);
  return Scope([self = shared_from_this(), before] { self->set_reduces(before); });
}

void BackwardPass::set_reduces(bool reduces) {
  std::lock_guard lock(mutex_);
  if (inside_backward()) throw std::logic_error("no_sync inside a backward pass");
  reduces_ = reduces;
}

}  // namespace tessera::internal
