#pragma once

#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Checks that all ranks pass the same lines of text, such as a description of the model. Collective. If the lines
// agree, runs one small all-reduce. If they differ, throws std::invalid_argument on every rank. The error names
// `subject`, the lowest rank whose lines differ from rank 0's, and the first line that differs.
void require_agreement(Communicator& comm, const std::string& subject, const std::vector<std::string>& lines);

// Returns `text` of every rank, in rank order. Collective: runs two all-gathers, of the lengths and of the texts.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& text, const std::string& what);

}  // namespace tessera::internal
