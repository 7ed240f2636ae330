// An accelerator for tests as at::kCUDA. It is simulated in a process without libtorch_cuda. If TESSERA_TEST_GPU names
// the library tessera_gpu (tests/support/gpu), test programs load this library, and use the machine's GPUs instead.
//
// In the simulation, streams are threads with random delays. Device memory faults when the host touches it. Operators
// run asynchronously on CPU kernels. Missing order is found whatever the threads' timing: vector clocks compare each
// access of device or page-locked memory with all accesses that may be in flight (races.h). Host synchronisations are
// counted by place. A program that links tessera_accelerator has the device. A test must first construct a Simulation.
//
// On GPUs, groups are NCCL's, and a Simulation only counts host synchronisations, without places. Skips tests that need
// the simulation, or more devices than the machine has.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::accelerator {

bool on_gpus();
int device_count();  // of the simulation or of the machine
// Skip the test by GoogleTest's exception: always; if there are fewer than `count` devices; on GPUs.
[[noreturn]] void skip(const std::string& why);
void needs_devices(int count);
void needs_simulation(const std::string& why);

// Returns the seeds to try: `count` seeds, or only TESSERA_ACCELERATOR_SEED if that is set. On GPUs, returns one seed.
std::vector<uint64_t> seeds(int count);

// The kinds of requests to simulated streams that a planted fault (Settings::leave_out) can drop.
enum class Request : uint8_t {
  kRecord,
  kBlock,
  kSynchronize,
  kRecordStream,
  kCollectiveBegins,
  kCollectiveEnds,
  kCollectiveInTurn  // if dropped, the collective swaps places with the next one of its group
};

struct Settings {
  uint64_t seed = seeds(1)[0];  // seed of the random delays
  int longest_delay_us = 200;   // 0: no delays
  // All groups of a device share a stream, so that their collectives run in the order of issue: the strictest order
  // that a GPU may have. If two ranks then use groups in different orders, they deadlock.
  bool collectives_in_order = false;
  // shutdown() blocks until the groups of all peers have ended, by shutdown() or abort(), as NCCL's may.
  bool groups_end_together = false;
  // Reductions add in the order of a ring. So, as with NCCL, a result's rounding depends on its place in the tensor.
  bool sums_by_ring = false;
  // Plants a fault: requests for which leave_out() returns true are dropped. `place` names Tessera's functions on the
  // call stack, the innermost first. Must be thread-safe.
  std::function<bool(Request request, std::string_view place)> leave_out = nullptr;
  // Plants a failure of NCCL: if fails() returns an error text, `collective` ("all-reduce of 8 elements") fails on the
  // rank of `device`. Its Work then has an exception, and its kernel ends only when the group is aborted.
  std::function<std::string(int device, std::string_view collective)> fails = nullptr;
};
const Settings& settings();
// Returns whether a planted fault drops the request. Computes the place only if leave_out is set.
bool is_left_out(Request request);

// Events on a device since the Simulation began.
struct Counts {
  int64_t launches = 0;                         // launches of kernels and copies
  int64_t host_waits = 0;                       // synchronisations of the host with the device
  int64_t events_elsewhere = 0;                 // uses of its events by threads whose current device is another one
  int64_t registered_collectives = 0;           // collectives whose results are in memory registered with their group
  std::map<std::string, int64_t> wait_places;   // host waits by operation and place
  std::map<std::string, int64_t> launch_names;  // launches by operator
};

// Enables the accelerator for a test or a part of a test. At most one may exist at a time. Its constructor and
// destructor wait for all streams, and free all memory without tensors. If the test fails, prints the seed.
class Simulation {
 public:
  explicit Simulation(Settings settings = {});
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  static bool is_running();
  // Returns a text for each unordered pair of accesses and for other misuse, without duplicates. Empty on GPUs.
  static std::vector<std::string> findings();
  static Counts counts(int device);
  static void reset_counts();
};

// Return the bytes of page-locked memory in use, in whole pages, and of device memory that is in use or cached.
int64_t page_locked_bytes();
int64_t reserved_bytes(int device);

}  // namespace tessera::accelerator
