#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

// Turns on libtorch's autocast for one device type while the object exists, like torch.autocast in Python. Operators on
// autocast's list convert floating-point inputs to `dtype`; parameters do not change. Works in all ZeRO stages; in
// stage 3, MixedPrecision needs less traffic and memory. Create the object before forward, and destroy it before
// backward:
//
//   std::optional<tessera::Autocast> autocast(std::in_place, comm->device().type());
//   at::Tensor loss = torch::mse_loss(ddp(x), y);
//   autocast.reset();
//   loss.backward();
//
// Changes the state of the calling thread only. The destructor restores that state, and must run on the same thread.
// Objects may be nested. The destructor of the outermost object frees the cached casts of weights. An inner object with
// `enabled` = false turns autocast off for a part of the model. kHalf needs ShardedGradScaler.
class Autocast {
 public:
  // `dtype`: kBFloat16 or kHalf, or kFloat while an outer object casts to 16 bits. Empty: the outer object's; without
  // an outer object, kBFloat16 on CPUs and kHalf on GPUs. `caches`: true casts each weight only once while the object
  // exists; empty: the outer object's value, or true without one. Throws std::invalid_argument for any other dtype.
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
