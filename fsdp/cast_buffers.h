#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include <tessera/options/fsdp_options.h>

namespace tessera::internal {

// The module's buffers that are cast to MixedPrecision::buffer_dtype, with their original dtypes. Checkpoints and state
// dictionaries store buffers in the original dtypes.
class CastBuffers {
 public:
  // Casts floating-point buffers in place, because module members refer to them. Skips exempt and ignored modules.
  void cast(const torch::nn::Module& module, const FsdpOptions& options);

  // Returns `value` in the original dtype of buffer `name`; returns `value` unchanged if the buffer is not cast.
  at::Tensor own_value(const std::string& name, const at::Tensor& value) const;

  // Throws std::logic_error, naming the buffer, if the storage of a cast buffer has the size of the original dtype. In
  // that case torch::load() replaced the storage but kept the cast dtype, so values are garbage. `rank` is for errors.
  void require_no_foreign_bytes(const std::string& rank) const;

 private:
  struct Entry {
    at::Tensor buffer;
    at::ScalarType own;
  };
  std::map<std::string, Entry> by_name_;
};

}  // namespace tessera::internal
