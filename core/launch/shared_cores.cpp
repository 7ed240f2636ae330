#include "core/launch/shared_cores.h"

#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/memory/container_limits.h"
#include "core/runtime/guarded_by.h"

namespace tessera {
namespace internal {
namespace {

std::mutex sharing;
// The numbers of threads before and after the change; threads_before is 0 if nothing was changed.
int threads_before TESSERA_GUARDED_BY(sharing) = 0;
int threads_set TESSERA_GUARDED_BY(sharing) = 0;

// Whether the program or its user has chosen the number of threads. All cores or half of them (MKL) are defaults.
bool is_chosen(int threads) {
  for (const char* name : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"})
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return true;
  const int all = at::intraop_default_num_threads();
  return threads != all && threads != (all + 1) / 2;
}

// Whether the launcher has bound this process to cores of its own. MPI's launchers and Slurm may do that.
bool is_bound(const std::string& launcher) {
  if (launcher == kTorchrun || launcher == kSpawnLocal || launcher == kByHand) return false;
  cpu_set_t allowed;
  return ::sched_getaffinity(0, sizeof(allowed), &allowed) == 0 &&
         CPU_COUNT(&allowed) < ::sysconf(_SC_NPROCESSORS_ONLN);
}

}  // namespace

void share_cores(const LaunchEnvironment& environment, int cores) {
  if (environment.local_world_size < 1 || is_bound(environment.launcher)) return;
  std::lock_guard lock(sharing);
  const int threads = at::get_num_threads();
  const int share = std::max(1, cores / environment.local_world_size);
  if (threads_before != 0 || share >= threads || is_chosen(threads)) return;
  at::set_num_threads(share);
  threads_before = threads;
  threads_set = share;
}

void stop_sharing_cores() {
  std::lock_guard lock(sharing);
  const int before = std::exchange(threads_before, 0);
  if (before != 0 && at::get_num_threads() == threads_set) at::set_num_threads(before);
}

}  // namespace internal

int available_cores() {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));  // limited by affinity
  const auto quota = internal::cpu_quota(internal::ControlGroups::of_this_process());
  return quota && *quota < cores ? std::max(1, static_cast<int>(std::ceil(*quota))) : cores;
}

}  // namespace tessera
