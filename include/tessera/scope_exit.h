#pragma once

#include <exception>
#include <functional>
#include <utility>

namespace tessera {

// Changes the behaviour of a wrapper while it exists: no_sync(), summon_full_params(). Move-only.
class [[nodiscard]] ScopeExit {
 public:
  // Calls `leave` once, when the scope ends.
  explicit ScopeExit(std::function<void()> leave) : leave_(std::move(leave)) {}
  ScopeExit(ScopeExit&& other) noexcept : leave_(std::exchange(other.leave_, nullptr)) {}
  // Takes over `other`, then ends the scope held before. Throws the errors of that scope's `leave`.
  ScopeExit& operator=(ScopeExit&& other) {  // NOLINT(performance-noexcept-move-constructor): throws
    ScopeExit ended(std::exchange(leave_, std::exchange(other.leave_, nullptr)));
    ended.leave();
    return *this;
  }
  // Ends the scope now; throws what `leave` throws.
  void leave() {
    if (auto leave = std::exchange(leave_, nullptr)) leave();
  }
  // Ends the scope. During unwinding, discards exceptions of `leave`, because the first exception says more.
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
