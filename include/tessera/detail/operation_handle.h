#pragma once

#include <memory>
#include <utility>

namespace tessera::internal {

// An operation that runs while its caller continues, such as a collective or a copy. If it is destroyed before
// finish(), it must keep the resources alive that are still in use.
class AsyncOperation {
 public:
  AsyncOperation() = default;
  AsyncOperation(const AsyncOperation&) = delete;
  AsyncOperation& operator=(const AsyncOperation&) = delete;
  virtual ~AsyncOperation() = default;
  // Blocks until the operation completes. Throws its error. Called at most once, by the handle.
  virtual void finish() = 0;
};

// The caller's handle of an operation in flight. Derived handles define the wait. Move-only; must be used by the thread
// that started the operation.
template <class OperationType>
class [[nodiscard]] OperationHandle {
 public:
  using Operation = OperationType;

  OperationHandle() = default;  // of a completed operation
  // Of an operation in flight. For implementations of operations.
  explicit OperationHandle(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}

  // Whether there is nothing to wait for.
  bool done() const noexcept { return operation_ == nullptr; }

 protected:
  // Afterwards the handle is done(), even if the operation failed. A second call is a no-op.
  void finish() {
    if (auto operation = std::exchange(operation_, nullptr)) operation->finish();
  }
  Operation* operation() const noexcept { return operation_.get(); }

 private:
  std::unique_ptr<Operation> operation_;
};

}  // namespace tessera::internal
