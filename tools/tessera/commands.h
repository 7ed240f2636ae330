#pragma once

#include <boost/optional.hpp>

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/memory_plan.h>

// The subcommands of `tessera`; all but plan, calibrate and `trace merge` work on checkpoints. Each prints to standard
// output and returns the exit code: 0, or 1 if it found damage or differences. Errors are thrown.

// plan: the speed of the machine, as a file, as numbers, or as a file with some numbers replaced; all empty: unknown.
struct SpeedArguments {
  std::string gpu;  // the name of a card, instead of a file
  std::string file, flops, flops_fp32, bandwidth, operator_time;
  std::string link, latency;            // between hosts; also within a host unless given
  std::string host_link, host_latency;  // within a host

  bool operator==(const SpeedArguments&) const = default;
};

struct Arguments {
  std::vector<std::filesystem::path> paths;
  bool json = false;
  bool slices = false;                  // inspect: the place of each slice
  bool state = false;                   // consolidate: the optimizer's tensors too
  boost::optional<int> ranks;           // reshard (required); calibrate: concurrent ranks; none: 2
  int64_t max_file_bytes = 0;           // consolidate
  double tolerance = 0;                 // diff
  bool parameters = false;              // diff: parameters only
  std::string model;                    // plan: its shape, or a file
  int gpus = 0;                         // plan
  std::string memory;                   // plan: of each GPU
  boost::optional<int64_t> sequence;    // plan: for a model file; none: its whole context, or as exported
  boost::optional<int64_t> batch;       // plan: for a model file; none: 1, or as exported
  boost::optional<int> ranks_per_host;  // plan; none: from the speed file, or 8
  std::string host_memory;              // plan: of each host; "": unknown
  boost::optional<int> copies;          // plan: of an elastic run; none: no elastic run
  bool search = false;                  // plan: further options
  std::string html;                     // plan: the page to write
  boost::optional<int> draw;            // plan: the line of the table to draw; none: the recommended one
  std::string measured;                 // plan: a trace of a real run to draw beside it
  SpeedArguments speed;                 // plan
  std::filesystem::path out;            // calibrate
  int threads = 1;                      // calibrate: of each rank
  bool quick = false;                   // calibrate
};

int inspect(const Arguments& arguments);
int verify(const Arguments& arguments);
int consolidate(const Arguments& arguments);
int reshard(const Arguments& arguments);
int diff(const Arguments& arguments);
int plan(const Arguments& arguments);
int merge_trace_files(const Arguments& arguments);
int calibrate(const Arguments& arguments);

// Throws std::invalid_argument that names the option if the value is out of range.
void require_range(const std::string& option, int64_t value, int64_t least, int64_t most);

// Returns parse(text). Errors begin with the option.
template <class Parse>
auto parse_option(const std::string& option, const std::string& text, Parse parse) {
  try {
    return parse(text);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("--" + option + " " + error.what());
  }
}

// Prints a value. Paths may hold bytes that are not UTF-8; each is printed as U+FFFD.
void print_json(const nlohmann::json& value);

// The speed of machines, if all that times need is known; otherwise the missing part, "" if no speed was given.
struct KnownSpeed {
  std::optional<tessera::MachineSpeed> speed;
  std::string missing;
};

// Returns the speed for SpeedArguments. Sets machines.ranks_per_host. Throws std::invalid_argument that names an
// invalid argument.
KnownSpeed speed_of(const Arguments& arguments, tessera::Machines& machines);
