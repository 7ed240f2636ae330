#pragma once

#include <memory>
#include <string>

namespace tessera {

// The handle of a collective that is under way.
//
// It keeps every tensor of the operation alive, those that the caller gave and those in between,
// until the operation is over. Move-only. Use it from the thread that started the operation.
//
// Destroying a handle that was never waited for is allowed (an exception is unwinding, say): the
// tensors then stay alive as long as the communicator, and the results are unspecified.
class [[nodiscard]] Pending {
 public:
  // One operation, as a backend implements it. finish() is called at most once, by wait().
  class Operation {
   public:
    Operation() = default;
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;
    virtual ~Operation() = default;
    // Returns when the results are there: in memory (gloo), or ordered into the current stream
    // of the device (NCCL). Throws CommError.
    virtual void finish() = 0;
  };

  Pending() = default;  // an operation that is over
  explicit Pending(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}

  // Waits for the operation, at most the group's timeout. Results may be read afterwards, and the
  // tensors changed. A second call returns at once.
  // Throws CommError, which names the operation, the unit and the rank.
  void wait() {
    if (auto operation = std::move(operation_)) operation->finish();
  }

  // Whether wait() has nothing left to do.
  bool done() const noexcept { return operation_ == nullptr; }

 private:
  std::unique_ptr<Operation> operation_;
};

}  // namespace tessera
