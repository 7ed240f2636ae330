#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera::internal {

// Checks a wrapper's gradients before an optimizer's step. The check is attached to the parameters, because an
// optimizer such as OSS has no reference to the wrapper. Each training forward attaches its wrapper's check again,
// because set_data() may have removed the check, and another wrapper may have replaced it.
class StepCheck {
 public:
  // `check` throws if a step must not use the gradients. It may be called after the wrapper was destroyed.
  explicit StepCheck(std::function<void()> check);

  // Attaches the check to the parameter. A no-op if already attached.
  void attach(const at::Tensor& parameter) const;
  // Whether the check of another wrapper is attached to the parameter.
  bool is_replaced(const at::Tensor& parameter) const;

 private:
  friend void check_before_step(const std::vector<at::Tensor>& parameters);
  struct Mark;
  const c10::intrusive_ptr<c10::BackendMeta> mark_;  // of type Mark
};

// Calls each check that is attached to any of the parameters, once. Check functions may throw.
void check_before_step(const std::vector<at::Tensor>& parameters);

}  // namespace tessera::internal
