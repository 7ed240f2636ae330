#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera::internal {

// Checks a wrapper's gradients before an optimizer's step. The check is attached to the parameters, because an
// optimizer like OSS is not given the wrapper. A later wrapper's check replaces it. set_data() removes it, so each
// forward attaches it again.
class StepCheck {
 public:
  // `check` throws if the gradients must not be used by a step. It may outlive the wrapper.
  explicit StepCheck(std::function<void()> check);

  // Attaches the check to the parameter. A no-op if it is attached.
  void attach(const at::Tensor& parameter) const;

 private:
  friend void check_before_step(const std::vector<at::Tensor>& parameters);
  struct Mark;
  const c10::intrusive_ptr<c10::BackendMeta> mark_;  // a Mark
};

// Calls the checks that are attached to these parameters, each once. Throws their exceptions.
void check_before_step(const std::vector<at::Tensor>& parameters);

}  // namespace tessera::internal
