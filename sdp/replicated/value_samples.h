#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/layout/unit_plan.h"

namespace tessera::internal {

// One value of each parameter, the one in the middle of its memory, as bits: by which a write is noticed that raises no
// version, as libtorch's SGD and whoever goes through .data() write. Ranks whose parameters are the same have the same.
class ValueSamples {
 public:
  ValueSamples() = default;
  // On a device they are gathered there, in the order of the current stream, and the host knows none of them.
  static ValueSamples of(const std::vector<PlannedParameter>& parameters);

  bool empty() const { return on_host_.empty() && !on_device_.defined(); }
  bool is_on_device() const { return on_device_.defined(); }
  // By parameter, of samples on the host.
  uint64_t operator[](size_t parameter) const { return on_host_[parameter]; }
  bool operator==(const ValueSamples& other) const { return on_host_ == other.on_host_; }

  // Of samples on a device, there, and of as many parameters: [1] kLong, 1 if any differs, else 0.
  at::Tensor any_differs_from(const ValueSamples& other) const;
  // The same: [parameters] kLong, 0 for one that is the same, else a number of its value, of 1 to 2^42.
  at::Tensor where_other_than(const ValueSamples& other) const;

 private:
  std::vector<uint64_t> on_host_;
  at::Tensor on_device_;  // [parameters] kLong
};

}  // namespace tessera::internal
