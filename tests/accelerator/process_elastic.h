#pragma once

#include <chrono>
#include <string>

#include "tests/accelerator/rank_processes.h"

namespace tessera::process_ranks {

// Elastic training in which one rank is killed. The survivors must continue in their processes, and end with the values
// of a run that saves a checkpoint, and continues from it with fewer ranks.
struct ElasticDeath {
  const char* name;
  bool is_of_rank_0 = false;
};
inline constexpr ElasticDeath kElasticDeaths[] = {
    {"is killed in an elastic run"},
    {"of the store is killed in an elastic run", /*is_of_rank_0=*/true},
};

// Trains as one rank. Returns the exit code. Throws if the run continued with a wrong group, step or values.
int train_elastically(const ElasticDeath& death);

// Prints the survivors' results. Returns whether all survivors have succeeded, with equal values.
bool check_elastic_survivors(const ElasticDeath& death, RankProcesses& ranks, std::chrono::seconds limit);

}  // namespace tessera::process_ranks
