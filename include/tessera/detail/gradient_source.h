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

  // Arrived is called for each set of parameters whose .grad is now the average over ranks. It is called
  // on the thread that runs backward, and not for a backward that does not reduce (no_sync()). It must
  // return soon. Its exceptions leave backward(). Failed, unless null, is called if a backward that
  // reduces fails, before backward() throws. Failed must not throw. It may wait for other threads that use
  // the parameters.
  using Arrived = std::function<void(const std::vector<at::Tensor>& parameters)>;
  using Failed = std::function<void()>;
  // Registers an observer until the scope ends. Throws std::logic_error if one exists, and inside a backward pass.
  virtual ScopeExit on_gradients(Arrived arrived, Failed failed) = 0;

  // Returns the wrapper's parameters that have a .grad, of the last backward or of an earlier one.
  virtual std::vector<at::Tensor> parameters_with_gradients() const = 0;

  // While the scope exists, uses of the parameters' values outside backward throw std::logic_error with `reason`. Such
  // uses are operators of forward(), summon_full_params() and full_state_dict(). Direct reads of the shards are not
  // detected. Thread-safe; not collective.
  virtual ScopeExit refuse_use(std::string reason) = 0;

  // Scales the gradients so that their norm over all parameters and ranks is at most max_norm. Returns the norm before
  // scaling. Collective. Must be called between backward and step.
  virtual GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) = 0;
};

}  // namespace tessera::internal
