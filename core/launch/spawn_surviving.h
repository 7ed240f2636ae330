#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>

namespace tessera::internal {

struct Survival {
  int least_ranks = 1;                                        // all are ended if fewer run, restart or have succeeded
  int restarts = 0;                                           // largest number of restarts of each rank
  std::map<std::string, std::string> variables = {};          // added to the environment of all ranks
  std::map<std::string, std::string> restart_variables = {};  // added for restarted ranks only
  std::function<bool()> may_restart = nullptr;                // permits a restart; null only if `restarts` is 0
};

// Like spawn_local(), but ranks continue when others fail. Returns 0 if Survival::least_ranks ranks or more succeed.
int spawn_surviving(int world, int argc, char** argv, std::chrono::milliseconds grace, const Survival& survival);

}  // namespace tessera::internal
