// An accelerator for tests as at::kCUDA. It is simulated in a process without libtorch_cuda; or it is this machine's
// GPUs, if TESSERA_TEST_GPU names the library tessera_gpu (tests/support/gpu), which the test programs then load.
//
// Streams are threads with random delays; device memory faults when the host touches it; operators run asynchronously
// on CPU kernels. Missing order is found whatever the threads' timing. Vector clocks compare each access of device
// memory and of page-locked memory with all accesses that may be in flight (races.h). Host synchronisations are counted
// with their places. A program that links tessera_accelerator has the device; a test must construct a Simulation first.
//
// On GPUs, groups are NCCL's. A Simulation then adds no delays and finds nothing; it counts only host synchronisations,
// without places. A test that needs more, or more devices than the machine has, is skipped, by name.
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
// Skip the test by GoogleTest's exception: always; with fewer than `count` devices; on GPUs.
[[noreturn]] void skip(const std::string& why);
void needs_devices(int count);
void needs_simulation(const std::string& why);

// Returns the seeds to try: `count` seeds, or the one in TESSERA_ACCELERATOR_SEED. One on GPUs.
std::vector<uint64_t> seeds(int count);

// A request to the simulated streams, which a planted fault drops.
enum class Request : uint8_t {
  kRecord,
  kBlock,
  kSynchronize,
  kRecordStream,
  kCollectiveBegins,
  kCollectiveEnds,
  kCollectiveInTurn  // dropped: swaps with the next collective of its group
};

struct Settings {
  uint64_t seed = seeds(1)[0];  // of the delays
  int longest_delay_us = 200;   // 0: no delays
  // All groups of a device share a stream, so that their collectives run in the order of issue: the strictest order of
  // a GPU. Groups used in different orders on two ranks then deadlock.
  bool collectives_in_order = false;
  // A rank's group ends when its peers' groups do, by shutdown() or abort(), as NCCL's communicators may.
  bool groups_end_together = false;
  // Reductions add in the order of a ring, so that results depend on the place of a value in its tensor, as NCCL's do.
  bool sums_by_ring = false;
  // Plants a fault: drops the requests for which it returns true. `place` has the names of our functions on the call
  // stack, the innermost first. Is called by several threads.
  std::function<bool(Request request, std::string_view place)> leave_out = nullptr;
  // Unless it returns "", NCCL fails in this collective ("all-reduce of 8 elements") on this device's rank. Its work
  // has an exception, and its kernel ends only when the group is aborted.
  std::function<std::string(int device, std::string_view collective)> fails = nullptr;
};
const Settings& settings();
// Whether to drop the request; computes the place only if leave_out is set.
bool is_left_out(Request request);

// Events on a device since the Simulation began.
struct Counts {
  int64_t launches = 0;                         // of kernels and copies
  int64_t host_waits = 0;                       // synchronisations of the host with the device
  int64_t events_elsewhere = 0;                 // recorded, awaited or ended by threads with another current device
  int64_t registered_collectives = 0;           // with results in memory that is registered with their group
  std::map<std::string, int64_t> wait_places;   // host waits by operation and place
  std::map<std::string, int64_t> launch_names;  // launches by operator
};

// One test, or a part of one; at most one at a time. Its constructor and destructor wait for all streams. Afterwards,
// memory without tensors is free again. If the test fails, it prints the seed.
class Simulation {
 public:
  explicit Simulation(Settings settings = {});
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  static bool is_running();
  // Returns unordered pairs of accesses and other misuse as text, each once. None on GPUs.
  static std::vector<std::string> findings();
  static Counts counts(int device);
  static void reset_counts();
};

// Return page-locked memory in use, in whole pages, and device memory in tensors or cached.
int64_t page_locked_bytes();
int64_t reserved_bytes(int device);

}  // namespace tessera::accelerator
