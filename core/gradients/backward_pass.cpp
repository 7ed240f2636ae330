#include "core/gradients/backward_pass.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include "core/runtime/no_grad_no_inference_guard.h"
#include "core/runtime/warn.h"

namespace tessera::internal {

namespace {

using torch::autograd::Engine;
using NodePointer = decltype(torch::autograd::Edge::function);  // libtorch 2.15 has its own kind

// libtorch's engine, but a failed pass drops its callbacks before backward() throws. libtorch's own thread for a device
// drops them at any time after that: a token would mark gradients as lost after the caller's zero_grad(), and nothing
// tells us of that zero_grad(). CPU passes run on the caller's thread and need no such engine.
class PunctualEngine final : public Engine {
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

// In a process without devices this is libtorch's own engine. Must be chosen before the first backward: libtorch starts
// the threads of devices once in a process, for the engine that runs it, and an engine that is set later has none.
Engine& engine_of_process() {
  static Engine& engine = at::globalContext().hasCUDA() ? *new PunctualEngine : Engine::get_base_engine();
  return engine;  // its threads outlive main()
}

// Does nothing if another library, Python for one, has set an engine.
[[maybe_unused]] const bool kHasSetEngine = [] {
  const bool is_libtorchs = &Engine::get_default_engine() == &Engine::get_base_engine();
  if (is_libtorchs) torch::autograd::set_default_engine_stub(&engine_of_process);
  return is_libtorchs;
}();

}  // namespace

static std::string gone_text(const std::string& name) {
  return name +
         " was destroyed inside its own backward pass, so gradients are not reduced over the ranks: keep it until "
         "backward() has returned";
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

struct BackwardPass::Token {
  Token(std::weak_ptr<BackwardPass> owner, std::string name) : pass(std::move(owner)), gone(gone_text(name)) {}
  ~Token() {
    if (is_over) return;
    if (const auto owner = pass.lock()) {
      owner->after_failure();  // first: who still reads gradients, which go now
      owner->failed();
    }
  }
  const std::weak_ptr<BackwardPass> pass;
  const std::string gone;  // an error
  bool is_over = true;     // until the engine owns it, and when it has called back
};

BackwardPass::BackwardPass() = default;

void BackwardPass::enter() {
  if (is_running()) return;
  auto token = std::make_shared<Token>(weak_from_this(), name());
  token_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([token] {
    token->is_over = true;
    const auto pass = token->pass.lock();
    if (!pass) throw std::logic_error(token->gone);
    pass->ended();
  });
  token->is_over = false;
  NoGradNoInferenceGuard quiet;
  recover();
  begin();
}

void BackwardPass::fail_backward() const noexcept {
  if (!inside_backward()) return;
  try {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [gone = gone_text(name())] { throw std::logic_error(gone); });
  } catch (const std::exception& error) {  // lack of memory
    warn(error.what());
  }
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
  NoGradNoInferenceGuard quiet;
  try {
    {
      std::lock_guard lock(mutex_);
      token_.reset();
      end();
    }
    after_end();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    failed();
    std::lock_guard lock(mutex_);
    recover();
    throw;
  }
}

void BackwardPass::failed() {
  std::lock_guard lock(mutex_);
  NoGradNoInferenceGuard quiet;
  failed_ = true;
  failed_reducing_ = reduces_;
  fail();
}

void BackwardPass::recover() {
  if (std::exchange(failed_, false)) abandon();
}

ScopeExit BackwardPass::no_sync() {
  const bool before = reduces_;
  set_reduces(false);
  return ScopeExit([self = shared_from_this(), before] { self->set_reduces(before); });
}

void BackwardPass::set_reduces(bool reduces) {
  std::lock_guard lock(mutex_);
  if (inside_backward()) throw std::logic_error("no_sync inside a backward pass");
  reduces_ = reduces;
}

}  // namespace tessera::internal
