#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

namespace tessera::internal {

// One kept tensor.
class SavedInput {
 public:
  virtual ~SavedInput() = default;
  // Returns a tensor of equal values, sizes and strides on the original device. May be called several times.
  virtual at::Tensor fetch() = 0;
};

// Storage for the inputs that checkpointed() needs in backward, in place of autograd's.
class SavedInputs {
 public:
  virtual ~SavedInputs() = default;
  // Keeps a tensor, or returns null to leave it to autograd. Its values must not change before backward; checkpointed()
  // checks that.
  virtual std::unique_ptr<SavedInput> keep(const at::Tensor& tensor) = 0;

  // While it is alive, checkpointed() on this thread keeps inputs in `inputs`, which must outlive the graph.
  class Scope {
   public:
    // Replaces the current storage until destruction.
    explicit Scope(SavedInputs& inputs) : before_(std::exchange(current_, &inputs)) {}
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    SavedInputs* const before_;
  };
  // Returns this thread's current storage; null: autograd's.
  static SavedInputs* current() { return current_; }

 private:
  static inline thread_local SavedInputs* current_ = nullptr;
};

}  // namespace tessera::internal
