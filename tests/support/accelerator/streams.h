// Streams and events of the simulated accelerator, and the known order of their work.
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
// 0: the default; then the pool, which is reused in turn; then exclusive streams
inline constexpr int kStreamsPerDevice = 64;
inline constexpr int kPool = 32;
inline constexpr int kOrderedStream = kStreamsPerDevice - 1;  // of all groups, with Settings::collectives_in_order
inline constexpr int kStreams = kDevices * kStreamsPerDevice;

// By stream: the amount of its work known to be over. (Vector clocks: Fidge and Mattern, 1988.)
using Clock = std::array<uint64_t, kStreams>;

// A one-time event.
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
  int64_t recording = 0;  // that it is part of; 0: none (graphs.h)
  size_t node = 0;        // of the recording
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

// Enqueues work on the stream. It begins after all earlier work of the stream and a random delay. Checks the accesses
// now against all others that may be in flight when it begins: races.h. `also`: more work that is known to be over.
void launch(int stream, std::string what, const std::vector<Access>& accesses, std::function<void()> work,
            const Clock* also = nullptr);

// Returns a kernel's work when it is enqueued on the stream: once, or by each replay if it is recorded.
using Prepare = std::function<std::function<void()>(int stream)>;
void launch_prepared(int stream, const std::string& what, const std::vector<Access>& accesses, const Prepare& prepare);

Point record(int stream);
void block(int stream, const Point& point);
// Blocks the host; counted, with its place.
void synchronize(const Point& point, int device, const char* what);
void synchronize(int stream, const char* what);
// Returns whether the point is reached. If so, later host accesses are ordered after it.
bool query(const Point& point, int device);
// Blocks until the stream is idle without recording any order, for the simulation itself.
void wait_in_secret(int stream);

}  // namespace tessera::accelerator
