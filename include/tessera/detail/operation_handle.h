#pragma once

#include <memory>
#include <utility>

namespace tessera::internal {

// What goes on while its caller does something else, implemented by whoever does it: a collective, a copy. Destroyed
// before finish(), it keeps what it uses alive as long as it must.
class AsyncOperation {
 public:
  AsyncOperation() = default;
  AsyncOperation(const AsyncOperation&) = delete;
  AsyncOperation& operator=(const AsyncOperation&) = delete;
  virtual ~AsyncOperation() = default;
  // Returns when it is over, and throws what went wrong. Called at most once, by the handle.
  virtual void finish() = 0;
};

// A caller's handle of an operation that is under way; derived handles name the wait. Move-only; used from the thread
// that started the operation.
template <class OperationType>
class [[nodiscard]] OperationHandle {
 public:
  using Operation = OperationType;  // what goes on

  OperationHandle() = default;  // of an operation that is over
  // Of one that has begun: for those who start operations.
  explicit OperationHandle(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}

  // Whether there is nothing left to wait for.
  bool done() const noexcept { return operation_ == nullptr; }

 protected:
  // The handle is done() afterwards, also if the operation failed; a second call returns at once.
  void finish() {
    if (auto operation = std::exchange(operation_, nullptr)) operation->finish();
  }
  Operation* operation() const noexcept { return operation_.get(); }

 private:
  std::unique_ptr<Operation> operation_;
};

}  // namespace tessera::internal
