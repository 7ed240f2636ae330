// Streams and events of the simulated accelerator, and the order of their work that is known.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::accelerator {

inline constexpr int kDevices = 5;
// Stream 0 is the default stream. 1 to kPool - 1 are a pool, which is used in turn. The others are exclusive streams.
inline constexpr int kStreamsPerDevice = 64;
inline constexpr int kPool = 32;
inline constexpr int kOrderedStream = kStreamsPerDevice - 1;  // all groups' stream, if Settings::collectives_in_order
inline constexpr int kStreams = kDevices * kStreamsPerDevice;

// For each stream, how much of its work is known to be over. (Vector clocks: Fidge and Mattern, 1988.)
using Clock = std::array<uint64_t, kStreams>;

// An event that occurs once.
class Moment {
 public:
  void come();
  void wait();
  bool is_past();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool past_ = false;
};

// A point in a stream's work, recorded by an event.
struct Point {
  std::shared_ptr<Moment> reached = std::make_shared<Moment>();
  Clock clock{};
  int64_t recording = 0;  // number of the recording that contains the point (graphs.h); 0: none
  size_t node = 0;        // index in the recording
};

// A kernel's access to memory.
struct Access {
  uintptr_t begin, end;
  bool writes;
};

// Streams are numbered over all devices.
inline int stream_of(int device, int64_t id) { return device * kStreamsPerDevice + static_cast<int>(id); }
inline int device_of(int stream) { return stream / kStreamsPerDevice; }
// The calling thread's current device, and its current stream of a device.
int current_device();
int exchange_device(int device);
int current_stream(int device);
int exchange_stream(int stream);  // sets the stream of its device; returns the previous one
int next_of_pool(int device);
int take_stream(int device);  // returns an exclusive stream
void give_stream(int stream);

// Enqueues work(), to begin after all earlier work of the stream and a random delay. Checks `accesses` now against all
// accesses that may be in flight when the work begins (races.h). Work in `also` is known to be over, too.
void launch(int stream, std::string what, const std::vector<Access>& accesses, std::function<void()> work,
            const Clock* also = nullptr);

// Returns a kernel's work. Called when the kernel is enqueued on a stream: once, or by each replay if it is recorded.
using Prepare = std::function<std::function<void()>(int stream)>;
void launch_prepared(int stream, const std::string& what, const std::vector<Access>& accesses, const Prepare& prepare);

Point record(int stream);
void block(int stream, const Point& point);
// Block the host, and count this wait with its place.
void synchronize(const Point& point, int device, const char* what);
void synchronize(int stream, const char* what);
// Returns whether the point is reached. If so, later host accesses are ordered after it.
bool query(const Point& point, int device);
// Blocks until the stream is idle. For the simulation itself: does not count the wait, and records no order.
void wait_in_secret(int stream);

}  // namespace tessera::accelerator
