#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <tessera/scope_exit.h>
#include "core/gradients/autograd_engine.h"

namespace tessera::internal {

// Base class of a wrapper's handling of gradients. Each backward() is a pass, with these calls:
//
//   not running -- enter(), by the first of our hooks --> begin() -- the engine's callback --> end()
//                                                             \--- an exception ends it ---> fail() ... abandon()
//
// The engine destroys the callbacks of a pass when the pass fails, which calls fail() before backward() throws. Until
// then, hooks on threads that are not the engine's (a custom backward may start one) belong to the running pass. fail()
// does not block. recover() blocks; a subclass must call it before its next collective.
//
// Must be owned by a shared pointer. On a device the engine calls back from its own threads, never while the user's
// thread runs. The mutex orders these calls. It is not recursive: callbacks to the user (visitors, observers) and
// operators on the user's tensors must run without it, since they may call back.
class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  virtual ~BackwardPass() = default;

  // While a scope exists, passes do not reduce. Opening or closing it in a backward throws std::logic_error.
  ScopeExit no_sync();
  bool reduces() const { return no_sync_scopes_ == 0; }
  // Sets the divisor of sums over ranks, from the next pass on.
  virtual void set_divisor(double divisor) = 0;
  virtual std::optional<double> divisor() const = 0;  // empty: the number of ranks
  // Prepares passes whose work is recorded for replays (CapturedStep). Must be called just before a recording, on the
  // stream that will record. Throws std::invalid_argument, naming the option, if the host takes part in a pass.
  virtual void prepare_capture() = 0;
  // Must be called before each replay. Abandons a failed pass, and takes over changes of parameters as a forward does.
  // Throws as above, and std::logic_error for changes that a forward refuses.
  virtual void prepare_replay() = 0;

 protected:
  BackwardPass();
  virtual void begin() = 0;
  // Called on the engine's thread; backward() throws its exceptions. After any but CommError the pass has failed and is
  // abandoned at once. After a CommError there is nothing to wait for.
  virtual void end() = 0;
  virtual void fail() = 0;     // called before backward() throws: must not be collective, must not throw
  virtual void abandon() = 0;  // blocks until nothing of a failed pass is in flight
  // After end(), without the mutex: an exception fails the pass.
  virtual void after_end() {}
  // The wrapper, for errors.
  virtual std::string name() const = 0;
  // Makes the backward that runs on this thread, if any, throw at its end. For the destructor of a subclass: gradients
  // that backward has not reached would stay unreduced.
  void fail_backward() const noexcept;
  // Called for every exception, before backward() throws, without the mutex. Must not throw.
  virtual void after_failure() {}

  // begin(), end(), fail() and abandon() are called with the mutex locked, as enter() and recover() must be.

  // Begins a pass unless one is running. Must be called in a backward. Of nested backwards the outermost must call it
  // first, since the pass ends with the backward that began it.
  void enter();
  bool is_running() const { return !token_.expired(); }
  void recover();  // abandons a pass that failed
  // Whether the last failed pass would have reduced: other ranks may have waited for it.
  bool failed_reducing() const { return failed_reducing_; }

  mutable std::mutex mutex_;

 private:
  struct Token;
  void ended();
  void finish_pass();
  void failed();
  void count_no_sync_scope(int change);

  std::weak_ptr<Token> token_;  // the engine owns it until the pass ends
  bool failed_ = false;         // true until the failed pass is abandoned
  bool failed_reducing_ = false;
  int no_sync_scopes_ = 0;  // open ones, which may close in any order
};

}  // namespace tessera::internal
