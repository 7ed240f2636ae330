#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

// Turns on libtorch's autocast for one device type while the object exists, like torch.autocast in Python. Operators on
// autocast's list convert floating-point inputs to `dtype`; parameters do not change. For ZeRO stages 0 to 2. In stage
// 3, MixedPrecision needs less traffic and memory. Create the object before forward, and destroy it before backward:
//
//   std::optional<tessera::Autocast> autocast(std::in_place, comm->device().type());
//   at::Tensor loss = torch::mse_loss(ddp(x), y);
//   autocast.reset();
//   loss.backward();
//
// Changes the state of the calling thread only. The destructor restores that state, and must run on the same thread.
// The end of the outermost scope frees the cast copies of weights. Scopes may be nested. An inner scope with `enabled`
// = false turns autocast off for a part of the model. kHalf needs ShardedGradScaler.
class Autocast {
 public:
  // `dtype`: kBFloat16, kHalf, or kFloat inside a 16-bit scope; empty: the device's default (kBFloat16 on CPUs, kHalf
  // on GPUs). `caches`: true casts each weight once per scope; empty: uses the setting of the surrounding scope. Throws
  // std::invalid_argument for any other dtype.
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
