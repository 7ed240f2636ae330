#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/model/grad_norm.h>
#include <tessera/scope_exit.h>

namespace tessera::internal {

// A wrapper that reports final gradients, so that an optimizer can step before backward ends.
class GradientSource {
 public:
  virtual ~GradientSource() = default;

  // Arrived is called when the .grad of each parameter in a set has become the average over ranks. The caller is the
  // thread that runs backward. Arrived is not called for a backward that does not reduce (no_sync()). Arrived must
  // return soon. backward() rethrows exceptions of Arrived. If a backward that reduces fails, Failed (if not null) is
  // called before backward() throws. Failed must not throw. Failed may wait for other threads that use the parameters.
  using Arrived = std::function<void(const std::vector<at::Tensor>& parameters)>;
  using Failed = std::function<void()>;
  // Registers an observer until the scope ends. Throws std::logic_error inside a backward, and if an observer exists.
  virtual ScopeExit on_gradients(Arrived arrived, Failed failed) = 0;

  // Returns the wrapper's parameters that have a .grad now, from the last backward or an earlier one.
  virtual std::vector<at::Tensor> parameters_with_gradients() const = 0;

  // While the scope exists, any use of the parameters' values outside backward throws std::logic_error with `reason`.
  // Such uses are operators of forward(), summon_full_params() and full_state_dict(). Direct reads of the shards are
  // not detected. Thread-safe; not collective.
  virtual ScopeExit refuse_use(std::string reason) = 0;

  // Scales the gradients so that their norm over all parameters and ranks is at most max_norm. Returns the norm before
  // scaling. Collective. Must be called between backward and step.
  virtual GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) = 0;
};

}  // namespace tessera::internal
