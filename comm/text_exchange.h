#pragma once

#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

// Every rank's text, in rank order, on every rank. Collective. Throws CommError; `what` says what
// the texts are for.
std::vector<std::string> exchange_texts(Communicator& comm, const std::string& text, const std::string& what);

}  // namespace tessera
