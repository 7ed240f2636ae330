#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

// A collective that failed: a peer died, did not come in time, or came with another operation.
// what() names the operation, the unit it was for and the rank; the group is of no use afterwards.
// Wrong arguments throw std::invalid_argument instead, before anything is sent.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera
