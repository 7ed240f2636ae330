#include "core/gradients/autograd_engine.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {

namespace {

using torch::autograd::Engine;
using NodePointer = decltype(torch::autograd::Edge::function);  // the type of the pointer depends on libtorch's version

// Behaves as libtorch's engine, but destroys the callbacks of a failed pass before backward() throws. On a device,
// libtorch's engine destroys the callbacks at some later time. ~BackwardPass::Token() could then mark gradients as lost
// after the caller's zero_grad(). CPU passes run on the caller's thread and do not need this engine.
class PunctualEngine final : public Engine {
 public:
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task, const NodePointer& node,
                           std::exception& error) override {
    std::vector<std::function<void()>> dropped;
    {
      std::lock_guard lock(task->final_callbacks_lock_);
      dropped.swap(task->final_callbacks_);
    }
    dropped.clear();  // destroys the callbacks, and the tokens that they own
    Engine::thread_on_exception(task, node, error);
  }
};

// Returns the engine for this process; without CUDA, libtorch's own. libtorch starts device threads only once, for the
// engine of the first backward. So PunctualEngine must be set before the first backward, or it would have no threads.
Engine& engine_of_process() {
  static Engine& engine = at::globalContext().hasCUDA() ? *new PunctualEngine : Engine::get_base_engine();
  return engine;  // PunctualEngine is leaked on purpose: its threads outlive main()
}

// Sets the engine of this process, unless another library, such as PyTorch for Python, has set its own.
[[maybe_unused]] const bool kHasSetEngine = [] {
  const bool is_libtorchs = &Engine::get_default_engine() == &Engine::get_base_engine();
  if (is_libtorchs) torch::autograd::set_default_engine_stub(&engine_of_process);
  return is_libtorchs;
}();

}  // namespace

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

void require_outside_backward(const char* call) {
  if (inside_backward()) throw std::logic_error(std::string(call) + " inside a backward pass");
}

void at_end_of_backward(std::function<void()> callback) {
  Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace tessera::internal
