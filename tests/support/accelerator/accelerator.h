// An accelerator for tests: at::kCUDA, simulated in a process without libtorch_cuda; or the GPUs of this machine, where
// TESSERA_TEST_GPU names the library tessera_gpu (tests/support/gpu), which the same programs then load.
//
// Streams are threads that are late at random; device memory is memory that faults when the host touches it; operators
// run asynchronously on CPU kernels. What no event orders is found whatever the threads happened to do: each access of
// device memory and of page-locked memory is compared, by vector clocks, with those that are not known to be over
// (races.h). Host synchronisations are counted with their places. A program that links tessera_accelerator has the
// device; a test begins with a Simulation.
//
// On GPUs groups are NCCL's, and a Simulation is a part of a test like any other: there are no delays, nothing is
// found, host synchronisations are counted without places, and nothing else is. A test that needs more, or more devices
// than there are, is skipped, and says so by name.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::accelerator {

bool on_gpus();
int device_count();  // of the simulation's devices, or of GPUs
// End the test as skipped, by an exception that GoogleTest knows: where there are fewer devices; on GPUs.
[[noreturn]] void skip(const std::string& why);
void needs_devices(int count);
void needs_simulation(const std::string& why);

// The seeds to try: `count` of them, or the one that TESSERA_ACCELERATOR_SEED names. On GPUs one.
std::vector<uint64_t> seeds(int count);

// What the program asks of streams, which a planted fault leaves out.
enum class Request : uint8_t {
  kRecord,
  kBlock,
  kSynchronize,
  kRecordStream,
  kCollectiveBegins,
  kCollectiveEnds,
  kCollectiveInTurn  // left out: it changes places with the next of its group
};

struct Settings {
  uint64_t seed = seeds(1)[0];  // of the delays
  int longest_delay_us = 200;   // 0: none
  // All groups of a device share a stream, so that their collectives run in the order of issue: the strictest that a
  // GPU may be. Groups that are used in different orders on two ranks then hang.
  bool collectives_in_order = false;
  // A rank's group ends when those of its peers do, by shutdown() or abort(), as NCCL's communicators may.
  bool groups_end_together = false;
  // Plants a fault: a request for which it returns true is left out. `place` has the names of the functions of ours
  // that asked for it, the innermost first. Called by several threads.
  std::function<bool(Request request, std::string_view place)> leave_out = nullptr;
  // NCCL finds an error of its own in this collective ("all-reduce of 8 elements") of this device's rank, unless "":
  // its work has an exception, and its kernel does not end before the group is aborted.
  std::function<std::string(int device, std::string_view collective)> fails = nullptr;
};
const Settings& settings();
// Whether it is to be left out; asks for the place only if there is somebody to tell it to.
bool is_left_out(Request request);

// What has happened on a device since the Simulation began.
struct Counts {
  int64_t launches = 0;                         // of kernels and copies
  int64_t host_waits = 0;                       // synchronisations of the host with the device
  int64_t registered_collectives = 0;           // whose results go to memory that is registered with their group
  std::map<std::string, int64_t> wait_places;   // the same by operation and place
  std::map<std::string, int64_t> launch_names;  // launches by operator
};

// One test, or a part of one. Waits for all streams at both ends; one at a time. Its memory is free again where no
// tensor is left. A test that fails in it says its seed.
class Simulation {
 public:
  explicit Simulation(Settings settings = {});
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  static bool is_running();
  // Pairs of accesses that nothing orders, and other misuse, each once, as text. None on GPUs.
  static std::vector<std::string> findings();
  static Counts counts(int device);
  static void reset_counts();
};

// Page-locked memory that is in use, in whole pages, and device memory that was ever taken.
int64_t page_locked_bytes();
int64_t reserved_bytes(int device);

}  // namespace tessera::accelerator
