#pragma once

#include <stdexcept>

namespace tessera {

// An archive of torch.export that cannot be read, or asks for what is not supported or not allowed. what() names the
// file and, where it is about a node of the graph, the node, its operator and the line of Python that it comes from.
class ExportedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera
