#include "core/runtime/run_clock.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// The alarms of a process, never destroyed. A child of fork() gets a new object, because the old lock may be held.
struct RunAlarms {
  explicit RunAlarms(RunAlarms* of_parent) : before(of_parent) {}

  RunAlarms* const before;  // of the parent process; kept reachable for leak checkers
  std::mutex mutex;
  std::multimap<RunClock::time_point, const RunAlarm*> waiting TESSERA_GUARDED_BY(mutex);

  // Calls the alarms that are due. Returns whether any are left.
  bool ring() {
    const std::lock_guard lock(mutex);
    while (!waiting.empty() && waiting.begin()->first <= RunClock::now()) {
      const RunAlarm* const due = waiting.begin()->second;
      waiting.erase(waiting.begin());
      due->act_();
    }
    return !waiting.empty();
  }
  static std::atomic<RunAlarms*> of_process;
};
std::atomic<RunAlarms*> RunAlarms::of_process{new RunAlarms(nullptr)};

namespace {

using std::chrono::steady_clock;

constexpr int kMostIdle = 20;  // number of ticks without use after which the thread ends
constexpr int64_t kMostGapNs = std::chrono::nanoseconds(RunClock::kMostGap).count();

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// The time is min(steady time - stopped, limit). A tick sets the limit to kMostGap from now. It writes `stopped` before
// the limit, and read() reads `stopped` after the limit. So a reader of the new limit sees the tick's `stopped`. The
// variables have no destructors, because the thread may tick until the process ends.
std::atomic<int64_t> stopped{0};
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
std::atomic<int64_t> limit{kNoLimit};
std::atomic<bool> is_used{false};  // whether the clock was read since the last tick
std::atomic<pid_t> alarms_owner{::getpid()};

// Returns the flag that says whether the thread exists. In a child of fork(), which has no thread, the kernel zeros it.
std::atomic<bool>& is_ticking() {
  static auto* const flag = [] {
    const size_t bytes = ::sysconf(_SC_PAGESIZE);
    void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
      page = ::operator new(bytes);
    else
      ::madvise(page, bytes, MADV_WIPEONFORK);
    return new (page) std::atomic<bool>(false);
  }();
  return *flag;
}

// Reads the steady clock last. Otherwise, if the process is stopped between the reads, the time could go back.
int64_t read() {
  const int64_t most = limit.load();
  const int64_t pause = stopped.load();
  return std::min(steady_ns() - pause, most);
}

void tick() {
  const int64_t steady = steady_ns(), now = std::min(steady - stopped.load(), limit.load());
  stopped.store(steady - now);
  limit.store(now + kMostGapNs);
}

// The thread's function. Returns after kMostIdle ticks without reads or alarms: then nothing waits for a deadline.
void run() {
  do {
    for (int idle = 0; idle < kMostIdle; std::this_thread::sleep_for(RunClock::kTick)) {
      tick();
      const bool has_alarms = RunAlarms::of_process.load()->ring();
      idle = is_used.exchange(false) || has_alarms ? 0 : idle + 1;
    }
    limit = kNoLimit;
    is_ticking() = false;
  } while (is_used && !is_ticking().exchange(true));  // a reader may have found the thread just before the thread ended
}

void start_ticking() noexcept {
  if (is_ticking().exchange(true)) return;
  // A child of fork() gets its own alarms.
  if (alarms_owner.exchange(::getpid()) != ::getpid()) RunAlarms::of_process = new RunAlarms(RunAlarms::of_process);
  tick();  // the process may be stopped before the thread starts
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // only the program's own threads handle signals
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {  // no thread can start: the clock then advances during stops too
    limit = kNoLimit;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

RunClock::time_point RunClock::now() noexcept {
  if (!is_used) is_used = true;
  if (!is_ticking()) start_ticking();
  return time_point(duration(read()));
}

RunAlarm::RunAlarm(RunClock::time_point until, std::function<void()> act) : until_(until), act_(std::move(act)) {
  RunAlarms& alarms = *RunAlarms::of_process.load();
  const std::lock_guard lock(alarms.mutex);
  alarms.waiting.emplace(until_, this);
  RunClock::now();  // starts the clock's thread, which calls due alarms
}

RunAlarm::~RunAlarm() {
  RunAlarms& alarms = *RunAlarms::of_process.load();
  const std::lock_guard lock(alarms.mutex);
  for (auto [entry, end] = alarms.waiting.equal_range(until_); entry != end; ++entry)
    if (entry->second == this) {
      alarms.waiting.erase(entry);
      break;
    }
}

}  // namespace tessera::internal
