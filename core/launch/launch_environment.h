#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

// What a launcher told this process about its group: a value, read once from the environment.
struct LaunchEnvironment {
  std::string launcher;  // "torchrun", "Open MPI" or "Slurm"; empty if none started this process
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;          // among the ranks of this host; -1 if the launcher does not say
  int local_world_size = 1;    // ranks of this host; 0 if the launcher does not say
  std::string master_address;  // where rank 0's store is served; empty only in a world of one
  int master_port = 0;         // 0 only in a world of one
  std::string job;             // tells this job from another one at the same address; may be empty
  std::string token;           // TESSERA_STORE_TOKEN, which the group's ranks alone know; may be empty

  bool agent_serves_store = false;  // torchrun's agent or spawn_local, not rank 0, serves the store
  int restart_count = 0;            // how often torchrun has started the group anew
  std::string note;                 // set if there is a launcher's job here that is not being joined

  bool launched() const noexcept { return !launcher.empty(); }
  bool one_host() const noexcept { return local_world_size == world_size; }
};

// Like std::getenv: the value of a variable, or nullptr.
using GetVariable = std::function<const char*(const char* name)>;

// Reads the environment of the innermost launcher; a world of one if there is none.
//
// torchrun's variables (RANK, WORLD_SIZE, ...) come first, since torchrun runs inside of the other two. Then Open
// MPI's, since mpirun starts its daemons with srun inside of a Slurm job. Then Slurm's, if srun started this process: a
// batch script or a shell of salloc has the job's variables too, but is no task of it, and is a world of one (`note`
// then says so). A job of one task of Open MPI or Slurm counts as no launcher: it has nobody to meet, and may be a
// shell. Throws std::invalid_argument, which names every variable concerned and its value, if variables are half set,
// not numbers, out of range, or if two launchers contradict each other.
LaunchEnvironment parse_launch_environment(const GetVariable& get);

// "node[03-05,9],gpu1" -> node03 node04 node05 node9 gpu1. Throws std::invalid_argument for a
// list that Slurm cannot have written, and for one of more than 65536 hosts.
std::vector<std::string> expand_host_list(std::string_view list);

// Slurm's tasks per node, "4(x2),3" -> 4 4 3. Throws std::invalid_argument as above.
std::vector<int> expand_task_counts(std::string_view counts);

// A port in [15000, 31000), the same for the same text: below the ports that Linux gives to
// outgoing connections, above those of most services.
int derived_port(std::string_view text) noexcept;

}  // namespace tessera::internal
