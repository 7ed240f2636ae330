#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/layout/unit_plan.h"
#include "core/paging/residency.h"

namespace tessera::internal {

// Stands in a tensor's .grad where the gradient is elsewhere, or is not one that a step may take.
//
// It looks like a gradient (shape, dtype, device) and has no data: any operator that is given it throws
// std::logic_error with the reason. zero_grad() in either form may clear it; it is told of that at once, even where
// `.grad` is only let go of, since the guard dies with the last reference to it. So a step that is taken with what is
// no gradient is an error, and one after zero_grad() does what it does on ordinary tensors.
//
// May be told on any thread that clears a gradient.
class GradPlaceholder : public Pager, public std::enable_shared_from_this<GradPlaceholder> {
 public:
  struct Events {
    std::function<std::string(size_t index)> reason;  // what the error says
    std::function<void(size_t index)> cleared;        // .grad was let go of; must not throw
    std::function<void(size_t index)> zeroed;         // .grad.zero_() was called
  };
  explicit GradPlaceholder(Events events) : events_(std::move(events)) {}
  ~GradPlaceholder() override;

  // The reason where a backward that failed has lost a gradient; `label` is the parameter's, as its binding has it.
  static std::string lost(const std::string& label);

  // Puts a guard into leaf.grad, in place of what is there.
  void put(size_t index, const std::string& name, const at::Tensor& leaf);
  // Whether leaf.grad is this guard's.
  bool is_in(size_t index, const at::Tensor& leaf) const;
  // Throws the reason.
  [[noreturn]] void refuse_step(size_t index) const { throw std::logic_error(events_.reason(index)); }
  // Takes it out: leaf.grad is undefined then. Nothing if it is not there.
  void take_out(size_t index, const at::Tensor& leaf);

  void use(const std::vector<Page*>& pages) override;
  bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;

 private:
  struct Notice;
  struct Slot {
    std::unique_ptr<Page> page;
    std::shared_ptr<std::atomic<bool>> is_awaited;  // that its end is told of
  };
  Slot& slot(size_t index);

  const Events events_;
  std::vector<Slot> slots_;
};

}  // namespace tessera::internal
