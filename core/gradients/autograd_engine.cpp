#include "core/gradients/autograd_engine.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <utility>
#include <vector>

namespace tessera::internal {

namespace {

using torch::autograd::Engine;
using NodePointer = decltype(torch::autograd::Edge::function);  // its type depends on libtorch's version

// libtorch's engine, except that a failed pass drops its callbacks before backward() throws. On a device libtorch drops
// them at any later time. Then a callback's token could mark gradients as lost after the caller's zero_grad(), which we
// cannot detect. CPU passes run on the caller's thread and need no such engine.
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
  return engine;  // a leak: its threads outlive main()
}

// Does nothing if another library, such as Python, has set an engine.
[[maybe_unused]] const bool kHasSetEngine = [] {
  const bool is_libtorchs = &Engine::get_default_engine() == &Engine::get_base_engine();
  if (is_libtorchs) torch::autograd::set_default_engine_stub(&engine_of_process);
  return is_libtorchs;
}();

}  // namespace

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

void at_end_of_backward(std::function<void()> callback) {
  Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace tessera::internal
