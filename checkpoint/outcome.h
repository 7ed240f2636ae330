#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

// How one rank's part of a collective function went, as a text that can travel: "" if well.
struct Outcome {
  bool misuse = false;  // std::invalid_argument rather than CheckpointError
  std::string error;
  std::string result;  // what the rank has to tell if all went well

  std::string to_text() const;
  static Outcome from_text(const std::string& text);
};

// Runs this rank's part; what it throws becomes the outcome. CommError passes through.
Outcome attempt(const std::function<std::string()>& part);

// Tells every rank every rank's outcome. If any failed, throws on all ranks: CheckpointError (or
// std::invalid_argument where the lowest that failed did), naming that rank and the cause. Otherwise
// returns the results in rank order. Collective.
std::vector<std::string> settle(Communicator& comm, const Outcome& own, const std::string& what);

// Throws what settle() throws, if any of these failed.
void throw_failures(const std::vector<Outcome>& outcomes, const std::string& what);

}  // namespace tessera
