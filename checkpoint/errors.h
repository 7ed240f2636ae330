#pragma once

#include <stdexcept>

namespace tessera {

// A checkpoint that cannot be written or read, or that does not fit the model. what() names the
// directory or file, the tensor and the reason, and, from a collective function, the rank.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera
