#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <tessera/scope_exit.h>
#include "core/gradients/autograd_engine.h"

namespace tessera::internal {

// Base class of the part of a wrapper that handles gradients. Each backward() is a pass, with these calls:
//
//   not running -- enter(), by the first of our hooks --> begin() -- the engine's callback --> end()
//                                                             \--- an exception ends it ---> fail() ... abandon()
//
// If a pass fails, the engine destroys the callbacks of the pass. Their destruction calls fail(), before backward()
// throws. Until then, all hooks belong to the running pass, even on threads that are not the engine's (a custom
// backward may start one). fail() does not block. recover() blocks; a subclass must call it before its next collective.
//
// Must be owned by a std::shared_ptr. On a device the engine calls back on its own threads, while the user's thread
// waits in backward(). The mutex orders these calls, and is not recursive. Callbacks to the user (visitors, observers)
// and operators on the user's tensors may call this object, so they must run without the mutex.
class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  virtual ~BackwardPass() = default;

  // While a returned scope exists, passes do not reduce. Opening or closing one in a backward throws std::logic_error.
  ScopeExit no_sync();
  bool reduces() const { return no_sync_scopes_ == 0; }
  // Sets the number by which sums over ranks are divided, from the next pass on.
  virtual void set_divisor(double divisor) = 0;
  virtual std::optional<double> divisor() const = 0;  // empty: the number of ranks
  // Prepares passes whose work is recorded for replays (CapturedStep). Must be called just before a recording, on the
  // stream that will record. Throws std::invalid_argument, naming the option, if an option makes the host join a pass.
  virtual void prepare_capture() = 0;
  // Must be called before each replay. Abandons a failed pass, and takes over changes of parameters as a forward does.
  // Throws like prepare_capture(), and throws std::logic_error for changes that a forward would refuse.
  virtual void prepare_replay() = 0;

 protected:
  BackwardPass();
  virtual void begin() = 0;
  // Called on the engine's thread. backward() rethrows its exceptions. After an exception other than CommError, the
  // pass has failed and is abandoned at once. A CommError ends the group, so nothing is left to wait for.
  virtual void end() = 0;
  virtual void fail() = 0;     // called before backward() throws: must not be collective, must not throw
  virtual void abandon() = 0;  // blocks until no operation of the failed pass is in flight
  // Called after end(), without the mutex. An exception fails the pass.
  virtual void after_end() {}
  // Returns the wrapper's name and rank, for errors.
  virtual std::string name() const = 0;
  // If this thread runs a backward, makes that backward throw at its end. For the destructor of a subclass: gradients
  // that the backward has yet to compute would not be reduced.
  void fail_backward() const noexcept;
  // Called for every exception of a pass, before backward() throws, without the mutex. Must not throw.
  virtual void after_failure() {}

  // begin(), end(), fail() and abandon() run with the mutex locked. Callers of enter() and recover() must lock it.

  // Begins a pass unless one is running. Must be called in a backward. The pass ends with the backward that began it,
  // so of nested backwards the outermost must call enter() first.
  void enter();
  bool is_running() const { return !token_.expired(); }
  void recover();  // abandons the last pass if it failed; else a no-op
  // Whether the last failed pass would have reduced gradients, so that other ranks may have waited for this rank.
  bool failed_reducing() const { return failed_reducing_; }

  mutable std::mutex mutex_;

 private:
  struct Token;
  void ended();
  void finish_pass();
  void failed();
  void count_no_sync_scope(int change);

  std::weak_ptr<Token> token_;  // the engine owns the token until the pass ends
  bool failed_ = false;         // true until the failed pass is abandoned
  bool failed_reducing_ = false;
  int no_sync_scopes_ = 0;  // number of open scopes, which may close in any order
};

}  // namespace tessera::internal
