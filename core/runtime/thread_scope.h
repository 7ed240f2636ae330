#pragma once

#include <utility>

namespace tessera::internal {

// Gives something that each thread has for itself another value while it lives: inner scopes count, and at the end
// there is what was before. A member of scopes that say what it means.
template <class Value>
class ThreadScope {
 public:
  // Of this thread's `place`, where it ends, too.
  ThreadScope(Value& place, Value value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~ThreadScope() { place_ = before_; }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  Value& place_;
  const Value before_;
};

}  // namespace tessera::internal
