#include "tests/support/accelerator/streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>
#include <utility>

#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/graphs.h"
#include "tests/support/accelerator/races.h"

namespace tessera::accelerator {
using namespace internal;
namespace {

// A thread that runs the work of a stream in order. Never destroyed, because the thread may outlive main().
class Worker {
 public:
  bool has_worked() {
    std::lock_guard lock(mutex_);
    return started_;
  }
  void add(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    if (!std::exchange(started_, true)) std::thread([this] { run(); }).detach();
    changed_.notify_one();
  }

 private:
  void run() {
    at::set_num_threads(1);
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    at::NoGradGuard no_grad;
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool started_ = false;
};

Worker* const workers = new Worker[kStreams];
std::vector<int> taken[kDevices];  // numbers of free exclusive streams, which give_stream() has returned
std::mutex taken_mutex;
std::atomic<int64_t> pool_position[kDevices];
thread_local int this_device = 0;
thread_local std::array<int, kDevices> this_stream{};

// Returns a random delay. Rarely delays the default stream, so that other streams are late relative to it.
std::chrono::microseconds delay_on(int stream) {
  const int longest_us = settings().longest_delay_us;
  if (longest_us == 0) return {};
  static std::array<std::atomic<uint64_t>, kStreams> launches{};
  std::minstd_rand random(static_cast<unsigned>(settings().seed * 7919 + ++launches[stream] * 31 + stream));
  random.discard(3);
  const bool is_late = random() % (stream % kStreamsPerDevice == 0 ? 16 : 2) == 0;
  return std::chrono::microseconds(is_late ? random() % longest_us : 0);
}

}  // namespace

void Moment::come() {
  std::lock_guard lock(mutex_);
  past_ = true;
  changed_.notify_all();
}

void Moment::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return past_; });
}

bool Moment::is_past() {
  std::lock_guard lock(mutex_);
  return past_;
}

int current_device() { return this_device; }
int exchange_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "simulated accelerator: device ", device, " of ", kDevices);
  return std::exchange(this_device, device);
}
int current_stream(int device) { return stream_of(device, this_stream.at(device)); }
int exchange_stream(int stream) {
  const int device = device_of(stream);
  return stream_of(device, std::exchange(this_stream.at(device), stream % kStreamsPerDevice));
}
int next_of_pool(int device) { return stream_of(device, 1 + pool_position[device]++ % (kPool - 1)); }

int take_stream(int device) {
  std::lock_guard lock(taken_mutex);
  static std::array<int, kDevices> unused = [] {
    std::array<int, kDevices> first{};
    first.fill(kPool);
    return first;
  }();
  if (!taken[device].empty()) {
    const int stream = taken[device].back();
    taken[device].pop_back();
    return stream;
  }
  TORCH_CHECK(unused[device] < kOrderedStream, "simulated accelerator: all streams of a device are taken");
  return stream_of(device, unused[device]++);
}

void give_stream(int stream) {
  std::lock_guard lock(taken_mutex);
  taken[device_of(stream)].push_back(stream);
}

void launch(int stream, std::string what, const std::vector<Access>& accesses, std::function<void()> work,
            const Clock* also) {
  if (record_launch(stream, what, accesses, [work](int) { return work; })) return;
  Races::get().launched(stream, what, accesses, also);
  workers[stream].add([work = std::move(work), what = std::move(what), delay = delay_on(stream)] {
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    try {
      work();
    } catch (const std::exception& error) {  // aborts, because later results would be invalid
      std::fprintf(stderr, "simulated accelerator: %s failed: %.500s\n", what.c_str(), error.what());
      std::abort();
    }
  });
}

void launch_prepared(int stream, const std::string& what, const std::vector<Access>& accesses, const Prepare& prepare) {
  if (!record_launch(stream, what, accesses, prepare)) launch(stream, what, accesses, prepare(stream));
}

Point record(int stream) {
  Point point;
  if (record_point(stream, point)) return point;
  point.clock = Races::get().clock_of(stream);
  workers[stream].add([reached = point.reached] { reached->come(); });
  return point;
}

void block(int stream, const Point& point) {
  if (record_block(stream, point)) return;
  Races::get().ordered(stream, point.clock);
  workers[stream].add([reached = point.reached] { reached->wait(); });
}

void synchronize(const Point& point, int device, const char* what) {
  refuse_while_recording(device, what, &point);
  point.reached->wait();
  Races::get().host_waited(device, point.clock, what);
}

void synchronize(int stream, const char* what) {
  refuse_while_recording(device_of(stream), what);
  synchronize(record(stream), device_of(stream), what);
}

bool query(const Point& point, int device) {
  refuse_while_recording(device, "a query of an event", &point);
  if (!point.reached->is_past()) return false;
  Races::get().host_knows(device, point.clock);
  return true;
}

void wait_in_secret(int stream) {
  if (!workers[stream].has_worked()) return;
  const auto reached = std::make_shared<Moment>();
  workers[stream].add([reached] { reached->come(); });
  reached->wait();
}

}  // namespace tessera::accelerator
