#pragma once

#include <utility>

namespace tessera::internal {

// Sets a thread-local variable while it exists, then restores the previous value. Scopes nest.
template <class Value>
class ThreadScope {
 public:
  // `place` must be a variable of this thread, which must also destroy the scope.
  ThreadScope(Value& place, Value value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~ThreadScope() { place_ = before_; }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  Value& place_;
  const Value before_;
};

// While an object exists, in_effect() is true on its thread. A base of classes that each name a condition.
template <class Name>
class ThreadCondition {
 public:
  static bool in_effect() { return in_effect_; }

 private:
  static inline thread_local bool in_effect_ = false;
  const ThreadScope<bool> scope_{in_effect_, true};
};

}  // namespace tessera::internal
