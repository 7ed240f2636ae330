#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/paging/residency.h"

namespace tessera::internal {

// The state of a tensor's `.grad`, as the wrapper tracks it.
enum class GradState {
  kOrdinary,      // undefined, or the average over ranks
  kPlaceholder,   // FSDP, on a parameter of the module: the gradient is in the shard's `.grad`
  kAccumulating,  // this rank's own sum, made under no_sync(); a step must not use it
  kLost,          // a failed backward lost the gradient: a step must not run before zero_grad()
  kUsers          // a tensor that the user has assigned
};

// Placeholders in the `.grad` of several tensors, for gradients that are elsewhere or that a step must not use.
//
// A placeholder has the shape, dtype and device of a gradient, but no data. Any operator that uses the data, except
// zero_(), throws std::logic_error with the reason. zero_grad() either resets `.grad` or calls zero_(). So a step of an
// optimizer throws before zero_grad(), and works as with ordinary tensors after zero_grad().
//
// Events are called on the thread that clears the gradient. Events::cleared is called when the last reference to the
// placeholder is destroyed: at the reset of `.grad`, unless the user keeps another reference.
class GradPlaceholder : public Pager, public std::enable_shared_from_this<GradPlaceholder> {
 public:
  struct Events {
    std::function<std::string(size_t index)> reason;  // returns the text of the error
    std::function<void(size_t index)> cleared;        // .grad was reset or replaced; must not throw
    std::function<void(size_t index)> zeroed;         // .grad.zero_() was called
  };
  explicit GradPlaceholder(Events events) : events_(std::move(events)) {}
  ~GradPlaceholder() override;

  // Returns the error text for a gradient that a failed backward has lost. `label`: see Binding::label().
  static std::string lost(const std::string& label);

  // Replaces leaf.grad by a placeholder; a no-op if leaf.grad already is this placeholder. `name` is for errors.
  void put(size_t index, const std::string& name, const at::Tensor& leaf);
  // Whether leaf.grad is this object's placeholder with this index.
  bool is_in(size_t index, const at::Tensor& leaf) const;
  // Throws std::logic_error with the text of Events::reason.
  [[noreturn]] void refuse_step(size_t index) const { throw std::logic_error(events_.reason(index)); }
  // Removes the placeholder, so that leaf.grad is undefined. A no-op if leaf.grad is another tensor.
  void take_out(size_t index, const at::Tensor& leaf);

  std::shared_ptr<void> use(const std::vector<Page*>& pages) override;
  bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;

 private:
  struct Notice;
  struct Slot {
    std::unique_ptr<Page> page;
    std::shared_ptr<std::atomic<bool>> is_awaited;  // whether to notify the owner when the placeholder is destroyed
  };
  Slot& slot(size_t index);

  const Events events_;
  std::vector<Slot> slots_;
};

}  // namespace tessera::internal
