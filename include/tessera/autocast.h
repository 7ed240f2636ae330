#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

// While it exists, libtorch's autocast is on for one device type, like torch.autocast in Python. Operators of its list
// get floating-point inputs in `dtype`; parameters do not change. For ZeRO stages 0 to 2; in stage 3, MixedPrecision
// needs less traffic and memory. Create it before forward, and destroy it before backward:
//
//   std::optional<tessera::Autocast> autocast(std::in_place, comm->device().type());
//   at::Tensor loss = torch::mse_loss(ddp(x), y);
//   autocast.reset();
//   loss.backward();
//
// Sets state of the calling thread only. The destructor restores the state, and must run on the same thread. The end of
// the outermost scope frees the cast copies of weights. Scopes may be nested. An inner scope with `enabled` = false
// turns autocast off for a part of the model. kHalf needs ShardedGradScaler.
class Autocast {
 public:
  // `dtype`: kBFloat16, kHalf, or kFloat inside a 16-bit scope; empty: libtorch's for the device (kBFloat16 on CPUs,
  // kHalf on GPUs). `caches`: true casts each weight once in the scope; empty: keeps the setting outside the scope.
  // Throws std::invalid_argument for any other dtype.
  explicit Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype = std::nullopt, bool enabled = true,
                    std::optional<bool> caches = std::nullopt);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const c10::DeviceType device_;
  const bool was_enabled_;
  const c10::ScalarType former_dtype_;
  const bool cached_;
};

}  // namespace tessera
