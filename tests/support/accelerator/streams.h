// Streams and events of the simulated accelerator, and what is known of the order of their work.
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
inline constexpr int kStreamsPerDevice = 64;  // 0: the default; then the pool, which repeats; then those taken for good
inline constexpr int kPool = 32;
inline constexpr int kOrderedStream = kStreamsPerDevice - 1;  // of all groups, with Settings::collectives_in_order
inline constexpr int kStreams = kDevices * kStreamsPerDevice;

// By stream: how much of its work is known to be over. (Vector clocks: Fidge and Mattern, 1988.)
using Clock = std::array<uint64_t, kStreams>;

// Something that happens once.
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

// A point in a stream's work, as an event records it.
struct Point {
  std::shared_ptr<Moment> reached = std::make_shared<Moment>();
  Clock clock{};
};

// What a kernel does to memory.
struct Access {
  uintptr_t begin, end;
  bool writes;
};

// Streams are numbered over all devices.
inline int stream_of(int device, int64_t id) { return device * kStreamsPerDevice + static_cast<int>(id); }
inline int device_of(int stream) { return stream / kStreamsPerDevice; }
// The current one of the calling thread.
int current_device();
int exchange_device(int device);
int current_stream(int device);
int exchange_stream(int stream);  // of its device; returns the one before
int next_of_pool(int device);
int take_stream(int device);  // one that nobody else gets
void give_stream(int stream);

// Gives the stream work, which begins when all earlier work of it is over, and after a random time. The accesses are
// checked now against all others that are not known to be over when it begins: races.h. `also`: over as well.
void launch(int stream, std::string what, const std::vector<Access>& accesses, std::function<void()> work,
            const Clock* also = nullptr);

Point record(int stream);
void block(int stream, const Point& point);
// The host waits: counted, with its place.
void synchronize(const Point& point, int device, const char* what);
void synchronize(int stream, const char* what);
// The host has seen that it is over.
bool query(const Point& point, int device);
// Waits for the work itself without learning anything from it: for the simulation's own needs.
void wait_in_secret(int stream);

}  // namespace tessera::accelerator
