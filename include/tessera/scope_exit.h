#pragma once

#include <exception>
#include <functional>
#include <utility>

namespace tessera {

// A guard that ends a scope, such as that of no_sync() or summon_full_params(), when it is destroyed. Move-only.
class [[nodiscard]] ScopeExit {
 public:
  // Calls `leave` once, when the scope ends. A null `leave` is allowed.
  explicit ScopeExit(std::function<void()> leave) : leave_(std::move(leave)) {}
  ScopeExit(ScopeExit&& other) noexcept : leave_(std::exchange(other.leave_, nullptr)) {}
  // Takes over the scope of `other`, and ends this object's former scope. Throws the errors of the ended scope.
  ScopeExit& operator=(ScopeExit&& other) {  // NOLINT(performance-noexcept-move-constructor): leave() may throw
    ScopeExit ended(std::exchange(leave_, std::exchange(other.leave_, nullptr)));
    ended.leave();
    return *this;
  }
  // Ends the scope now. Throws the errors of `leave`. A second call is a no-op.
  void leave() {
    if (auto leave = std::exchange(leave_, nullptr)) leave();
  }
  // Ends the scope. During stack unwinding, discards exceptions of `leave`, so that the first exception propagates.
  ~ScopeExit() noexcept(false) {
    try {
      leave();
    } catch (const std::exception&) {
      if (std::uncaught_exceptions() == 0) throw;
    }
  }

 private:
  std::function<void()> leave_;
};

}  // namespace tessera
