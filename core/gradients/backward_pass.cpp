#include "core/gradients/backward_pass.h"

#include <stdexcept>
#include <utility>

#include <tessera/errors.h>
#include "core/runtime/graph_recorder.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "core/runtime/warn.h"

namespace tessera::internal {

static std::string gone_text(const std::string& name) {
  return name +
         " was destroyed inside its own backward pass, so gradients are not reduced over the ranks: keep it until "
         "backward() has returned";
}

struct BackwardPass::Token {
  Token(std::weak_ptr<BackwardPass> owner, std::string name) : pass(std::move(owner)), gone(gone_text(name)) {}
  ~Token() {
    if (is_over) return;
    if (const auto owner = pass.lock()) {
      owner->after_failure();  // before failed(), which drops gradients that observers may still read
      owner->failed();
    }
  }
  const std::weak_ptr<BackwardPass> pass;
  const std::string gone;  // the error if the wrapper was destroyed during the pass
  bool is_over = true;     // false while the engine owns the token
};

BackwardPass::BackwardPass(at::Device device, const torch::nn::Module& module) : device_(device), module_(module) {}

BackwardPass::UserCall::UserCall(const BackwardPass& pass, const char* what) {
  if (inside_backward()) return;
  call_.emplace(pass.calls_, what, [&] { return pass.name(); });
  CapturedWork::note_use(pass.device_, std::const_pointer_cast<BackwardPass>(pass.shared_from_this()));
}

void BackwardPass::enter() {
  static constexpr char kWhat[] = "backward()";
  if (device_.is_cpu()) SingleThreadChecker::OnlyCall(calls_, kWhat, [this] { return name(); });
  if (is_running()) return;
  auto token = std::make_shared<Token>(weak_from_this(), name());
  token_ = token;
  at_end_of_backward([token] {
    token->is_over = true;
    const auto pass = token->pass.lock();
    if (!pass) throw std::logic_error(token->gone);
    pass->ended();
  });
  token->is_over = false;
  pass_call_ = std::make_unique<SingleThreadChecker::Call>(calls_, kWhat);
  NoGradNoInferenceGuard quiet;
  recover();
  begin();
}

void BackwardPass::fail_backward() const noexcept {
  if (!inside_backward()) return;
  try {
    at_end_of_backward([gone = gone_text(name())] { throw std::logic_error(gone); });
  } catch (const std::exception& error) {  // the callback could not be allocated
    warn(error.what());
  }
}

void BackwardPass::ended() {
  try {
    finish_pass();
  } catch (...) {
    after_failure();
    throw;
  }
}

void BackwardPass::finish_pass() {
  NoGradNoInferenceGuard quiet;
  std::unique_ptr<SingleThreadChecker::Call> call;
  try {
    {
      std::lock_guard lock(mutex_);
      token_.reset();
      call = std::move(pass_call_);
      end();
    }
    after_end();
  } catch (const CommError&) {
    throw;
  } catch (...) {
    failed();
    std::lock_guard lock(mutex_);
    recover();
    throw;
  }
}

void BackwardPass::failed() {
  std::lock_guard lock(mutex_);
  NoGradNoInferenceGuard quiet;
  pass_call_.reset();
  failed_ = reduces();
  fail();
}

void BackwardPass::recover() {
  if (const auto reduced = std::exchange(failed_, {})) abandon(*reduced);
}

void BackwardPass::require_capturable(std::initializer_list<std::pair<bool, const char*>> options) const {
  require_outside_backward("CapturedStep");
  for (const auto& [is_set, what] : options)
    if (is_set)
      throw std::invalid_argument("CapturedStep of " + name() + ": the host takes part in a pass with " + what +
                                  ", which no graph can contain: leave it off");
}

ScopeExit BackwardPass::no_sync() {
  count_no_sync_scope(1);
  return ScopeExit([self = shared_from_this()] { self->count_no_sync_scope(-1); });
}

void BackwardPass::count_no_sync_scope(int change) {
  std::lock_guard lock(mutex_);
  if (change < 0 || !inside_backward()) no_sync_scopes_ += change;  // a scope closes once, even if closing throws
  require_outside_backward("no_sync");
}

}  // namespace tessera::internal
