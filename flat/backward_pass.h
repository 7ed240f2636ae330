#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace tessera {

// Whether this thread runs a node of a backward pass.
bool inside_backward();

// One backward of the autograd engine after another, as the manager sees them:
//
//   not running -- enter(), by the first of our hooks --> running -- the engine's callback --> ended
//                                                              \--- an exception ends it ---> failed
//
// The engine drops what is queued for the end of a pass when it drops the pass. So a pass that fails is known to have
// failed as soon as the exception leaves backward(), and a thread that is not the engine's (one that a custom
// backward starts) is known to work for a pass that is running.
//
// Held by a shared pointer; enter() on the engine's threads, the rest anywhere.
class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  struct Events {
    std::function<void()> ended;   // on the engine's thread; may throw, and backward()'s caller sees it
    std::function<void()> failed;  // while the exception is on its way: neither collective nor throwing
  };
  explicit BackwardPass(Events events) : events_(std::move(events)) {}

  // Notes that a pass goes on; true if it is new. Inside a backward only. The end belongs to the pass whose node runs:
  // call it first in the outermost one.
  bool enter();
  bool is_running() const { return !token_.expired(); }

 private:
  struct Token;
  const Events events_;
  std::weak_ptr<Token> token_;  // the engine's, while the pass goes on
};

}  // namespace tessera
