#pragma once

#include <exception>
#include <functional>
#include <utility>

namespace tessera {

// A scope in which a wrapper behaves differently, such as no_sync() or summon_full_params(). Move-only.
class [[nodiscard]] ScopeExit {
 public:
  // Calls `leave`, unless null, once, when the scope ends.
  explicit ScopeExit(std::function<void()> leave) : leave_(std::move(leave)) {}
  ScopeExit(ScopeExit&& other) noexcept : leave_(std::exchange(other.leave_, nullptr)) {}
  // Takes over `other`, then ends the scope that this object held. Throws the errors of that scope's `leave`.
  ScopeExit& operator=(ScopeExit&& other) {  // NOLINT(performance-noexcept-move-constructor): throws
    ScopeExit ended(std::exchange(leave_, std::exchange(other.leave_, nullptr)));
    ended.leave();
    return *this;
  }
  // Ends the scope now. Throws the errors of `leave`. A second call is a no-op.
  void leave() {
    if (auto leave = std::exchange(leave_, nullptr)) leave();
  }
  // Ends the scope. During unwinding, discards exceptions of `leave`: the exception in flight says more.
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
