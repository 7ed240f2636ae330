#include <ATen/ops/full.h>
#include <signal.h>

#include <atomic>
#include <mutex>

#include <tessera/host_results.h>
#include <tessera/launch.h>
#include "core/comm/group_process.h"
#include "core/launch/process_setup.h"
#include "core/runtime/guarded_by.h"

namespace tessera {
using namespace internal;
namespace {

std::atomic<int> received = 0;  // the first caught signal; 0 if none

extern "C" void note_stop_signal(int signal) {
  int none = 0;
  received.compare_exchange_strong(none, signal);
}

struct StopSignal {
  int signal;
  bool is_caught = false;
  struct sigaction before {};
};

std::mutex catching;
int holders TESSERA_GUARDED_BY(catching) = 0;
StopSignal stop_signals[] TESSERA_GUARDED_BY(catching) = {{SIGINT}, {SIGTERM}, {SIGUSR1}};
std::atomic<bool> is_held_for_groups = false;

// Installs our handler, unless the program handles or ignores the signal.
void catch_signal(StopSignal& stop) {
  ::sigaction(stop.signal, nullptr, &stop.before);
  struct sigaction action {};
  action.sa_handler = &note_stop_signal;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);  // a second signal has the default action
  stop.is_caught = stop.before.sa_handler == SIG_DFL && ::sigaction(stop.signal, &action, nullptr) == 0;
}

// Restores the previous action, unless the program has set another handler since.
void release_signal(const StopSignal& stop) {
  struct sigaction now {};
  ::sigaction(stop.signal, nullptr, &now);
  if (stop.is_caught && (now.sa_handler == &note_stop_signal || now.sa_handler == SIG_DFL))
    ::sigaction(stop.signal, &stop.before, nullptr);
}

}  // namespace

namespace internal {

void catch_stop_signals() {
  std::lock_guard lock(catching);
  if (holders++ > 0) return;
  received = 0;
  for (StopSignal& stop : stop_signals) catch_signal(stop);
}

void release_stop_signals() {
  std::lock_guard lock(catching);
  if (--holders > 0) return;
  for (const StopSignal& stop : stop_signals) release_signal(stop);
}

}  // namespace internal

int stop_requested(Communicator& comm) {
  if (!is_held_for_groups.exchange(true)) {  // catches the signals until the last group of this process ends
    catch_stop_signals();
    call_after_last_group([] {
      is_held_for_groups = false;
      release_stop_signals();
    });
  }
  const int own = received;
  if (comm.size() == 1) return own;
  const at::Tensor signal = at::full({1}, own, at::TensorOptions(at::kCPU).dtype(at::kInt));
  return reduce_to_host(comm, signal, ReduceOp::kMax, "stop_requested").item<int>();
}

}  // namespace tessera
