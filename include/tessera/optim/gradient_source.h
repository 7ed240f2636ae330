#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/model/grad_norm.h>
#include <tessera/scope.h>

namespace tessera {

// A wrapper that tells when gradients are final, so that an optimizer need not wait for the whole of backward.
class GradientSource {
 public:
  virtual ~GradientSource() = default;

  // While the scope lives, `arrived` is called for each set of parameters whose .grad has just become the average over
  // ranks, on the thread that runs backward; it should return soon, and what it throws leaves backward. It is not
  // called for a backward that does not reduce (no_sync()). `failed`, if it is not null, is called when a backward that
  // may have called `arrived` has failed, before its caller is told; it does not throw, and may wait for other threads
  // that use the parameters. Throws std::logic_error for a second observer at a time, and inside a backward pass.
  using Arrived = std::function<void(const std::vector<at::Tensor>& parameters)>;
  using Failed = std::function<void()>;
  // See Arrived.
  virtual Scope on_gradients(Arrived arrived, Failed failed) = 0;

  // Its parameters that have a .grad, whichever backward has given it.
  virtual std::vector<at::Tensor> parameters_with_gradients() const = 0;

  // While the scope lives, what uses the parameters' values outside backward throws std::logic_error with `reason`: an
  // operator of forward(), summon_full_params(), full_state_dict(). Not known: who reads the shards themselves. Any
  // thread; not collective.
  virtual Scope refuse_use(std::string reason) = 0;

  // Scales the gradients so that their norm over all parameters and ranks is at most max_norm; returns the norm
  // before. Collective; between backward and step.
  virtual GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) = 0;
};

}  // namespace tessera
