#include "core/runtime/task_queue.h"

#include <memory>
#include <utility>

namespace tessera::internal {

std::future<void> TaskQueue::add(std::function<void()> task) {
  const auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
  threads_.run([packaged] { (*packaged)(); });
  return packaged->get_future();
}

}  // namespace tessera::internal
