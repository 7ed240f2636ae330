#pragma once

#include <stdexcept>

namespace tessera {

// An archive of torch.export cannot be read, or needs an unsupported or forbidden feature. what() names the file; for a
// node of the graph also the node, its operator and the line of Python.
class ExportedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera
