#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include <tessera/scope.h>

namespace tessera::internal {

// Whether this thread runs a node of a backward pass.
bool inside_backward();

// For what keeps a callback longer than its object may live: `call(object, ...)` while it does, then `gone(...)`.
template <class Object, class Call, class Gone>
auto while_alive(std::weak_ptr<Object> weak, Call call, Gone gone) {
  return [weak = std::move(weak), call = std::move(call), gone = std::move(gone)](const auto&... arguments) {
    const auto object = weak.lock();
    return object ? call(*object, arguments...) : gone(arguments...);
  };
}

// One backward of the autograd engine after another, as a policy of gradients sees them:
//
//   not running -- enter(), by the first of our hooks --> begin() -- the engine's callback --> end()
//                                                             \--- an exception ends it ---> fail() ... abandon()
//
// The engine drops what is queued for the end of a pass when it drops the pass. So a pass that fails is known to have
// failed as soon as the exception leaves backward(), and a thread that is not the engine's (one that a custom
// backward starts) is known to work for a pass that is running. Nothing is waited for then: recover(), which every
// policy calls first whenever it may be collective, does it.
//
// Held by a shared pointer. The engine calls back from its own threads where a device has one, never at the same
// time as the user's thread runs; the mutex makes that hand-over safe. It is recursive, since what calls back to the
// user (hooks, visitors, observers) may be answered by calls.
class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  virtual ~BackwardPass() = default;

  // While the scope lives, passes do not reduce. Opening and ending it throws std::logic_error inside a backward.
  Scope no_sync();
  bool reduces() const { return reduces_; }
  // What sums over ranks are divided by from the next pass on.
  virtual void set_divisor(double divisor) = 0;

 protected:
  BackwardPass();
  virtual void begin() = 0;
  // On the engine's thread; backward()'s caller sees what it throws. Unless that is a CommError, after which nothing
  // can be waited for, the pass has failed then, and is abandoned at once.
  virtual void end() = 0;
  virtual void fail() = 0;     // while the exception is on its way: neither collective nor throwing
  virtual void abandon() = 0;  // waits for what a failed pass has under way
  // For any exception, before backward()'s caller is told; without the mutex, and without throwing.
  virtual void after_failure() {}

  // Begins a pass unless one goes on. Inside a backward only. The end belongs to the pass whose node runs: call it
  // first in the outermost one.
  void enter();
  bool is_running() const { return !token_.expired(); }
  void recover();  // from a pass that failed, if one did
  // Whether the pass that failed last would have reduced: the other ranks may have waited for it.
  bool failed_reducing() const { return failed_reducing_; }

  mutable std::recursive_mutex mutex_;

 private:
  struct Token;
  void ended();
  void finish_pass();
  void failed();
  void set_reduces(bool reduces);

  std::weak_ptr<Token> token_;  // the engine's, while the pass goes on
  bool failed_ = false;         // and what was under way has not been waited for
  bool failed_reducing_ = false;
  bool reduces_ = true;
};

}  // namespace tessera::internal
