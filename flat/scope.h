#pragma once

#include <functional>
#include <utility>

namespace tessera {

// A scope that changes what a wrapper does, and ends with it: no_sync(), summon_full_params().
// Move-only.
class [[nodiscard]] Scope {
 public:
  explicit Scope(std::function<void()> leave) : leave_(std::move(leave)) {}
  Scope(Scope&& other) noexcept : leave_(std::exchange(other.leave_, nullptr)) {}
  Scope& operator=(Scope&&) = delete;
  // Ends the scope now; throws what ending it may throw. The destructor does the same, and where
  // an exception is already on its way swallows what ending it throws.
  void leave() {
    if (auto leave = std::exchange(leave_, nullptr)) leave();
  }
  ~Scope() noexcept(false);

 private:
  std::function<void()> leave_;
};

}  // namespace tessera
