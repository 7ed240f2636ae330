#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/memory_plan.h>

// The subcommands, all but plan, calibrate and `trace merge` of checkpoints. Each prints to standard output and returns
// the exit code: 0, or 1 where it found damage or differences. Errors are thrown.

// plan: how fast the machine is, as a file, by numbers, or a file of which some numbers are replaced; all empty:
// unknown.
struct SpeedArguments {
  std::string file, flops, flops_fp32, bandwidth, operator_time;
  std::string link, latency;            // between hosts; of one host, and where nothing else is known, within it too
  std::string host_link, host_latency;  // within a host

  bool operator==(const SpeedArguments&) const = default;
};

struct Arguments {
  std::vector<std::filesystem::path> paths;
  bool json = false;
  bool slices = false;         // inspect: where each slice lies
  bool state = false;          // consolidate: the optimizer's tensors too
  int ranks = 2;               // reshard, which wants to be told; calibrate: at once
  int64_t max_file_bytes = 0;  // consolidate
  double tolerance = 0;        // diff
  bool parameters = false;     // diff: of these alone
  std::string model;           // plan: its shape, or a file of it
  int gpus = 0;                // plan
  std::string memory;          // plan: of each
  int64_t sequence = 0;        // plan: of a file's model; 0: its whole context, or as it was exported
  int64_t batch = 0;           // plan: of a file's model; 0: 1, or as it was exported
  int ranks_per_host = 0;      // plan; 0: the speed file's, or 8
  std::string host_memory;     // plan: of each host; "": not known
  bool search = false;         // plan: further options
  std::string html;            // plan: the file of a page
  int draw = 0;                // plan: which line of the table is drawn; 0: the recommended one
  std::string measured;        // plan: a trace of a real run, drawn beside it
  SpeedArguments speed;        // plan
  std::filesystem::path out;   // calibrate
  int threads = 1;             // calibrate: of each rank
  bool quick = false;          // calibrate
};

int inspect(const Arguments& arguments);
int verify(const Arguments& arguments);
int consolidate(const Arguments& arguments);
int reshard(const Arguments& arguments);
int diff(const Arguments& arguments);
int plan(const Arguments& arguments);
int merge_trace_files(const Arguments& arguments);
int calibrate(const Arguments& arguments);

// What SpeedArguments say. Sets machines.ranks_per_host where it is 0. Throws std::invalid_argument that names what
// cannot be meant or is missing.
std::optional<tessera::MachineSpeed> speed_of(const Arguments& arguments, tessera::Machines& machines);
