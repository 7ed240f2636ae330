#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>

namespace tessera::internal {

struct Survival {
  int least_ranks = 1;                                // all are ended if fewer run, restart or have ended without error
  int restarts = 0;                                   // of each rank
  std::map<std::string, std::string> variables = {};  // added to the environment of all ranks
  std::map<std::string, std::string> restart_variables = {};  // added for restarted ranks only
  std::function<bool()> may_restart = nullptr;                // asked when a rank has failed; null if `restarts` is 0
};

// spawn_local(), whose ranks go on when others fail. Returns 0 in the end if enough ranks have ended without error.
int spawn_surviving(int world, int argc, char** argv, std::chrono::milliseconds grace, const Survival& survival);

}  // namespace tessera::internal
