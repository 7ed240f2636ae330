#pragma once

#include <utility>

namespace tessera::internal {

// Sets a thread-local variable while it exists, then restores the previous value. Scopes nest. For use as a member of a
// class that names the scope.
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

}  // namespace tessera::internal
