#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Checks that all ranks pass the same lines of text, such as a description of the model. Collective: runs one small
// all-reduce if the lines agree. Otherwise throws std::invalid_argument on every rank. The error names `subject`, the
// first line that differs, rank 0, and the lowest rank whose line differs from rank 0's.
void require_agreement(Communicator& comm, const std::string& subject, const std::vector<std::string>& lines);

// Returns the texts of all ranks in rank order. Collective: runs two small all-gathers.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& text, const std::string& what);

}  // namespace tessera::internal
