#pragma once

#include <memory>
#include <utility>

namespace tessera::internal {

// An operation that runs while its caller continues, such as a collective or a copy. If the object is destroyed before
// finish(), the implementation must keep alive all resources that the operation still uses.
class AsyncOperation {
 public:
  AsyncOperation() = default;
  AsyncOperation(const AsyncOperation&) = delete;
  AsyncOperation& operator=(const AsyncOperation&) = delete;
  virtual ~AsyncOperation() = default;
  // Blocks until the operation completes. Throws the operation's error. Must be called at most once.
  virtual void finish() = 0;
};

// The caller's handle of an operation in flight. Derived classes define the public wait function. Move-only; must be
// used by the thread that started the operation.
template <class OperationType>
class [[nodiscard]] OperationHandle {
 public:
  using Operation = OperationType;

  OperationHandle() = default;  // makes the handle of a completed operation
  // Makes the handle of an operation in flight. For implementations of operations.
  explicit OperationHandle(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}

  // Returns true if finish() has been called, or if the handle was made without an operation.
  bool done() const noexcept { return operation_ == nullptr; }

 protected:
  // Blocks until the operation completes. Throws its error. Then done() is true, also after an error; later calls are
  // no-ops.
  void finish() {
    if (auto operation = std::exchange(operation_, nullptr)) operation->finish();
  }
  Operation* operation() const noexcept { return operation_.get(); }

 private:
  std::unique_ptr<Operation> operation_;
};

}  // namespace tessera::internal
