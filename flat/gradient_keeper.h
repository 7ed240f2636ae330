#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

// Has parameters say, by `require_ready`, whether their gradients are such that a step may take them: for wrappers
// whose optimizers do not know them. The note stays with the TensorImpls until the next one.
void keep_gradients_of(const std::vector<at::Tensor>& parameters, std::function<void()> require_ready);

// Asks those who keep the gradients of these parameters, each once. Throws what they throw.
void require_ready_gradients(const std::vector<at::Tensor>& parameters);

}  // namespace tessera
