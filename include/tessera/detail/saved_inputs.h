#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

namespace tessera::internal {

// One tensor that is kept.
class SavedInput {
 public:
  virtual ~SavedInput() = default;
  // The same values, sizes and strides on the tensor's device, every time it is called.
  virtual at::Tensor fetch() = 0;
};

// Where checkpointed() keeps the inputs that backward will need, if not with autograd.
class SavedInputs {
 public:
  virtual ~SavedInputs() = default;
  // Null: the tensor is better left where it is. Its values may not change before backward, which checkpointed()
  // checks.
  virtual std::unique_ptr<SavedInput> keep(const at::Tensor& tensor) = 0;

  // While it lives, checkpointed() on this thread keeps inputs with `inputs`, which outlives the graph.
  class Scope {
   public:
    // Puts `inputs` in the place of what was used before, until destruction.
    explicit Scope(SavedInputs& inputs) : before_(std::exchange(current_, &inputs)) {}
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    SavedInputs* const before_;
  };
  // What this thread uses now; null: autograd keeps inputs itself.
  static SavedInputs* current() { return current_; }

 private:
  static inline thread_local SavedInputs* current_ = nullptr;
};

}  // namespace tessera::internal
