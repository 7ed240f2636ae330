#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <tessera/scope_exit.h>
#include "core/comm/single_thread_checker.h"
#include "core/gradients/autograd_engine.h"

namespace tessera::internal {

// Base class for the gradient reduction of a wrapper. Each backward() is one pass, which makes these calls:
//
//   not running -- enter(), by the first of our hooks --> begin() -- the engine's callback --> end()
//                                                             \--- an exception ends it ---> fail() ... abandon()
//
// If a pass fails, autograd's engine destroys the callbacks of the pass before backward() throws. Their destructors
// call fail(). Until then, all hooks belong to the running pass, even on threads that a custom backward started. fail()
// does not block. recover() blocks, and a subclass must call recover() before its next collective.
//
// Must be owned by a std::shared_ptr. On a device, the engine makes these calls on its own threads, while the user's
// thread waits in backward(). The mutex serializes the calls, and is not recursive. User callbacks (visitors,
// observers) and operators on the user's tensors may call this object, so they must run while the mutex is unlocked.
class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  virtual ~BackwardPass() = default;

  // Marks a call of the wrapper's user, for as long as this object exists. Calls of one thread may nest. Throws
  // std::logic_error if another thread is in a call, or in a backward that has called enter(). A no-op inside a
  // backward, which may recompute a forward on a thread of the engine.
  class UserCall {
   public:
    UserCall(const BackwardPass& pass, const char* what);

   private:
    std::optional<SingleThreadChecker::OnlyCall> call_;
  };

  // While a returned scope exists, passes do not reduce. Opening or closing one in a backward throws std::logic_error.
  ScopeExit no_sync();
  bool reduces() const { return no_sync_scopes_ == 0; }
  // Sets the number by which sums of gradients over ranks are divided. Must be called between passes.
  virtual void set_divisor(double divisor) = 0;
  virtual std::optional<double> divisor() const = 0;  // empty: the number of ranks
  // Prepares passes that will be recorded for replays (CapturedStep). Must be called before and after the step, on its
  // stream. Throws std::invalid_argument for an option that needs the host in a pass, std::logic_error in a backward.
  virtual void prepare_capture() = 0;
  // Must be called before each replay. Abandons a failed pass, and applies the user's changes of parameters as a
  // forward does. Throws the errors of prepare_capture(), and std::logic_error for changes that a forward would refuse.
  virtual void prepare_replay() = 0;
  const torch::nn::Module& module() const { return module_; }

 protected:
  BackwardPass(at::Device device, const torch::nn::Module& module);  // `module` must outlive this object
  virtual void begin() = 0;
  // Called on the engine's thread. backward() rethrows exceptions of end(). An exception other than CommError fails the
  // pass, which is abandoned at once. After a CommError the group is aborted, so no operation is left in flight.
  virtual void end() = 0;
  virtual void fail() = 0;  // called before backward() throws: must not be collective, must not throw
  // Blocks until the failed pass has no operation in flight. `reduced`: whether other ranks may wait for this rank.
  virtual void abandon(bool reduced) = 0;
  // Called after end(), with `mutex_` unlocked. If this function throws, the pass fails.
  virtual void after_end() {}
  virtual std::string name() const = 0;  // the wrapper's name and rank, for errors
  // If this thread is running a backward, makes that backward throw at its end. A destructor calls this function if a
  // reduction is due, because nothing would reduce the remaining gradients of that backward.
  void fail_backward() const noexcept;
  // Called after every exception in a pass, before backward() throws, with `mutex_` unlocked. Must not throw.
  virtual void after_failure() {}

  // begin(), end(), fail() and abandon() run with `mutex_` locked. Callers of enter() and recover() must lock `mutex_`.

  // Begins a pass; a no-op if a pass is running. Must be called in a backward. The pass ends when this backward ends,
  // so the outermost of nested backwards must call enter() first. On a CPU, where hooks run on the thread that called
  // backward(), throws std::logic_error if another thread is in a UserCall or in the pass.
  void enter();
  bool is_running() const { return !token_.expired(); }
  void recover();  // abandons the last pass if it failed; else a no-op
  // Throws the errors of prepare_capture(). `options`: for each option that needs the host, whether it is set.
  void require_capturable(std::initializer_list<std::pair<bool, const char*>> options) const;

  mutable std::mutex mutex_;

 private:
  struct Token;
  void ended();
  void finish_pass();
  void failed();
  void count_no_sync_scope(int change);

  const at::Device device_;  // of the parameters
  const torch::nn::Module& module_;
  mutable SingleThreadChecker calls_;
  std::unique_ptr<SingleThreadChecker::Call> pass_call_;  // null if no pass is running
  std::weak_ptr<Token> token_;                            // the engine owns the token until the pass ends
  std::optional<bool> failed_;                            // until a failed pass is abandoned: abandon()'s argument
  int no_sync_scopes_ = 0;                                // number of open scopes, which may close in any order
};

}  // namespace tessera::internal
