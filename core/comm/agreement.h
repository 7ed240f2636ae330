#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Makes sure that all ranks hold the same lines of text (a description of the model, of options, of what they did), at
// the cost of one small all-reduce if they do. Collective. Otherwise throws std::invalid_argument on every rank:
// `subject`, the first line that differs and the two ranks that differ in it, the lowest first.
void require_agreement(Communicator& comm, const std::string& subject, const std::vector<std::string>& lines);

// Every rank's text, in rank order, on all ranks. Collective: two small collectives.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& text, const std::string& what);

}  // namespace tessera::internal
