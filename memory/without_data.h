#pragma once

namespace tessera {

// While it lives, this thread runs a training program on tensors without data (dry_run()). What moves or computes
// numbers by pointer, where no operator sees it, is then left out.
class WithoutDataScope {
 public:
  WithoutDataScope();
  ~WithoutDataScope();
  WithoutDataScope(const WithoutDataScope&) = delete;
  WithoutDataScope& operator=(const WithoutDataScope&) = delete;

 private:
  const bool before_;
};
bool is_without_data();  // of this thread

}  // namespace tessera
