#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

// Launchers' names, for LaunchEnvironment::launcher.
inline constexpr const char* kTorchrun = "torchrun";
inline constexpr const char* kSpawnLocal = "spawn_local";
inline constexpr const char* kByHand = "RANK and WORLD_SIZE";  // these variables, set without torchrun

// The group of this process according to its launcher. A value type, read once from the environment.
struct LaunchEnvironment {
  std::string launcher;  // name, such as "torchrun" or "Slurm"; empty if no launcher started this process
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;          // number among the ranks of this host; -1 if unknown
  int local_world_size = 1;    // number of ranks of this host; 0 if unknown
  std::string master_address;  // address of the store's process; empty only in a world of one
  int master_port = 0;         // port of the store; 0 only in a world of one
  std::string job;             // distinguishes this job from others at the same address; may be empty
  std::string token;           // TESSERA_STORE_TOKEN, a secret of the group's ranks; may be empty

  bool agent_serves_store = false;  // torchrun's agent or spawn_local serves the store, not rank 0
  int restart_count = 0;            // number of restarts of the group by torchrun
  std::string note;                 // why this process does not join its Slurm job of several tasks; else empty

  bool launched() const noexcept { return !launcher.empty(); }
  bool one_host() const noexcept { return local_world_size == world_size; }
};

// Returns the value of a variable, or nullptr, as std::getenv does.
using GetVariable = std::function<const char*(const char* name)>;

// Reads the environment of the innermost launcher. Returns a world of one if there is no launcher.
//
// torchrun's variables (RANK, WORLD_SIZE, ...) take precedence, because torchrun runs inside the other launchers.
// Variables of MPI's launchers are next, because mpirun starts its daemons with srun inside a Slurm job. Slurm's
// variables are used if srun started this process. A batch script or a shell of salloc also has the job's variables,
// but is not a task. Such a process becomes a world of one. If the job has several tasks, `note` explains this. The
// only task of a job also becomes a world of one, because that task may be a shell.
//
// Throws std::invalid_argument, which lists the variables and their values, if variables are incomplete, not numbers or
// out of range. Also throws if two launchers contradict each other, or if a launcher sets no size or no address.
LaunchEnvironment parse_launch_environment(const GetVariable& get);

LaunchEnvironment read_launch_environment();

// Expands Slurm's list of hosts: "node[03-05,9],gpu1" -> node03 node04 node05 node9 gpu1. Throws std::invalid_argument
// for a malformed list, or one of more than 65536 hosts.
std::vector<std::string> expand_host_list(std::string_view list);

// Expands Slurm's tasks per node: "4(x2),3" -> 4 4 3. Throws std::invalid_argument if malformed or out of range.
std::vector<int> expand_task_counts(std::string_view counts);

// Derives a port in [15000, 31000) from a text. The range is below Linux's ports for outgoing connections and above the
// ports of most services.
int derived_port(std::string_view text) noexcept;

}  // namespace tessera::internal
