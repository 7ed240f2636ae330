#include "core/gradients/grad_placeholder.h"

#include <utility>

#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera::internal {

// Attached to a placeholder; its destructor notifies the owner. A tensor from detach() keeps the Notice alive, too.
struct GradPlaceholder::Notice : c10::BackendMeta {
  Notice(std::weak_ptr<GradPlaceholder> owner, size_t at, std::shared_ptr<std::atomic<bool>> awaited)
      : placeholder(std::move(owner)), index(at), is_awaited(std::move(awaited)) {}
  ~Notice() override {
    if (!is_awaited->exchange(false)) return;
    if (const auto owner = placeholder.lock()) owner->events_.cleared(index);
  }
  const std::weak_ptr<GradPlaceholder> placeholder;
  const size_t index;
  const std::shared_ptr<std::atomic<bool>> is_awaited;
};

GradPlaceholder::~GradPlaceholder() {
  for (Slot& slot : slots_)
    if (slot.page) slot.page->detach_pager();
}

std::string GradPlaceholder::lost(const std::string& label) {
  return "the gradient of " + label +
         " is incomplete, since a backward pass that failed has lost it: call zero_grad(), and run forward and "
         "backward again";
}

GradPlaceholder::Slot& GradPlaceholder::slot(size_t index) {
  if (slots_.size() <= index) slots_.resize(index + 1);
  return slots_[index];
}

void GradPlaceholder::put(size_t index, const std::string& name, const at::Tensor& leaf) {
  Slot& mine = slot(index);
  if (!mine.page) {
    mine.page = std::make_unique<Page>(this, static_cast<int>(index), name, leaf.device());
  } else if (is_in(index, leaf)) {
    return;
  }
  if (mine.is_awaited) *mine.is_awaited = false;
  mine.is_awaited = std::make_shared<std::atomic<bool>>(true);
  const at::Tensor stand_in = mine.page->view(leaf.scalar_type(), leaf.sizes(), leaf.strides(), 0);
  stand_in.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<Notice>(weak_from_this(), index, mine.is_awaited));
  leaf.mutable_grad() = stand_in;
}

bool GradPlaceholder::is_in(size_t index, const at::Tensor& leaf) const {
  return index < slots_.size() && slots_[index].page && leaf.grad().defined() && slots_[index].page->holds(leaf.grad());
}

void GradPlaceholder::take_out(size_t index, const at::Tensor& leaf) {
  if (!is_in(index, leaf)) return;
  *slots_[index].is_awaited = false;
  leaf.mutable_grad().reset();
}

std::shared_ptr<void> GradPlaceholder::use(const std::vector<Page*>& pages) {
  throw std::logic_error(events_.reason(static_cast<size_t>(pages[0]->id())));
}

bool GradPlaceholder::refuse(const Page& page, const at::Tensor&, const std::string& operation) {
  const auto index = static_cast<size_t>(page.id());
  if (operation != "aten::zero_") throw std::logic_error(events_.reason(index));
  const NoGradNoInferenceGuard quiet;  // of the new gradient
  events_.zeroed(index);
  return true;
}

}  // namespace tessera::internal
