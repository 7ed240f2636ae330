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

// The subcommands of `tessera`. All except plan, calibrate and `trace merge` work on checkpoints. Each prints to
// standard output. Returns the exit code: 0, or 1 if it found damage or differences. Throws errors.

// For `plan`: a machine's speed by a file or GPU, by numbers, or by both: numbers have priority. All empty: unknown.
struct SpeedArguments {
  std::string gpu;  // name of a GPU in gpu_cards.h; excludes `file`
  std::string file, flops, flops_fp32, bandwidth, operator_time;
  std::string link, latency;            // between hosts; also within a host if that link is not given
  std::string host_link, host_latency;  // within a host

  bool operator==(const SpeedArguments&) const = default;
};

struct Arguments {
  std::vector<std::filesystem::path> paths;
  bool json = false;
  bool slices = false;                  // inspect: prints the place of each slice
  bool state = false;                   // consolidate: also writes the optimizer's tensors
  boost::optional<int> ranks;           // reshard: new number of ranks; calibrate: concurrent ranks, by default 2
  int64_t max_file_bytes = 0;           // consolidate: maximum size of each written file
  double tolerance = 0;                 // diff: differences up to this value are ignored
  bool parameters = false;              // diff: compares only parameters
  std::string model;                    // plan: shape of the model, or a model file
  int gpus = 0;                         // plan: number of ranks
  std::string memory;                   // plan: memory of each GPU
  boost::optional<int64_t> sequence;    // plan: for a model file; none: its whole context, or as exported
  boost::optional<int64_t> batch;       // plan: for a model file; none: 1, or as exported
  boost::optional<int> ranks_per_host;  // plan; none: from the speed file, or 8
  std::string host_memory;              // plan: memory of each host; "": unknown
  boost::optional<int> copies;          // plan: copies of each rank's part in an elastic run; none: not elastic
  bool search = false;                  // plan: also tries further options
  std::string html;                     // plan: file of the timeline page to write
  boost::optional<int> draw;            // plan: the line of the table to draw; none: the recommended plan
  std::string measured;                 // plan: trace of a real run, to draw beside the prediction
  SpeedArguments speed;                 // plan
  std::filesystem::path out;            // calibrate: speed file to write
  int threads = 1;                      // calibrate: intra-operator threads of each rank
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

// Throws std::invalid_argument, which names the option, if `value` is not in [least, most].
void require_range(const std::string& option, int64_t value, int64_t least, int64_t most);

// Returns parse(text). Adds the name of the option to errors of parse().
template <class Parse>
auto parse_option(const std::string& option, const std::string& text, Parse parse) {
  try {
    return parse(text);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("--" + option + " " + error.what());
  }
}

// Prints a value. Replaces bytes that are not UTF-8, which paths may contain, by U+FFFD.
void print_json(const nlohmann::json& value);

// The speed of machines if it suffices to predict times; otherwise `missing` names its absent parts, or is "" if no
// speed was given.
struct KnownSpeed {
  std::optional<tessera::MachineSpeed> speed;
  std::string missing;
};

// Returns the speed that `arguments.speed` describes. Sets machines.ranks_per_host. Throws std::invalid_argument, which
// names the argument.
KnownSpeed speed_of(const Arguments& arguments, tessera::Machines& machines);
