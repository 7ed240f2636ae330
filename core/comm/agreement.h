#pragma once

#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Returns `text` of every rank, in rank order. Collective: runs two all-gathers, of the lengths and of the texts.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& text, const std::string& what);

}  // namespace tessera::internal
