#include <tessera/event_writer.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/runtime/crc32.h"
#include "core/runtime/file.h"
#include "core/runtime/host.h"
#include "core/runtime/warn.h"

namespace tessera {
using namespace internal;
namespace {

// The functions below encode a scalar as an Event message in Protocol Buffers' wire format
// (tensorflow/core/util/event.proto, framework/summary.proto). Libprotobuf is not used for these few fields, because
// every program with Tessera would have to link it, in addition to the copy inside libtorch.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

// Encodes a number in little-endian order, on any machine.
template <class Unsigned>
std::string fixed(Unsigned value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

std::string key(uint32_t field, WireType type) { return varint(field << 3 | type); }
std::string integer(uint32_t field, int64_t value) {
  return key(field, kVarint) + varint(static_cast<uint64_t>(value));
}
std::string real(uint32_t field, double value) { return key(field, kFixed64) + fixed(std::bit_cast<uint64_t>(value)); }
std::string real(uint32_t field, float value) { return key(field, kFixed32) + fixed(std::bit_cast<uint32_t>(value)); }
std::string bytes_of(uint32_t field, std::string_view bytes) {
  return key(field, kBytes) + varint(bytes.size()) + std::string(bytes);
}

std::string event(int64_t step, const std::string& what) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return real(1, now.count()) + integer(2, step) + what;  // the fields wall_time (in seconds) and step
}
std::string scalar_event(std::string_view tag, double value, int64_t step) {
  const auto point = bytes_of(1, tag) + real(2, static_cast<float>(value));  // a Summary.Value: tag, simple_value
  return event(step, bytes_of(5, bytes_of(1, point)));                       // the field summary, with one value
}

// Masks the checksum, as TensorFlow's record_writer.h does, because a CRC of data that contains CRCs is weak.
uint32_t masked_checksum(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return std::rotr(crc, 15) + 0xa282ead8U;
}

std::string record(const std::string& message) {
  const auto length = fixed(static_cast<uint64_t>(message.size()));
  return length + fixed(masked_checksum(length)) + message + fixed(masked_checksum(message));
}

std::string file_name() {
  static std::atomic<int> writers = 0;
  const auto now =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
  return "events.out.tfevents." + std::to_string(now.count()) + "." + host_name() + "." + std::to_string(::getpid()) +
         "." + std::to_string(writers++);
}

std::string reason(int error_number) { return std::generic_category().message(error_number); }

}  // namespace

EventWriter::EventWriter(const std::filesystem::path& folder, Options options)
    : options_(std::move(options)), process_(::getpid()), path_(folder / file_name()) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw std::runtime_error("EventWriter: cannot make the folder " + folder.string() + ": " + error.message());
  descriptor_ =
      retried([&] { return ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644); });
  if (descriptor_ < 0) throw std::runtime_error("EventWriter: cannot create " + path_.string() + ": " + reason(errno));
  kept_ = record(event(0, bytes_of(3, "brain.Event:2")));  // file_version, which TensorBoard expects first
  write();
}

EventWriter::~EventWriter() {
  if (process_ == ::getpid()) flush();
  ::close(descriptor_);
}

void EventWriter::scalar(std::string_view tag, double value, int64_t step) {
  std::string bytes = record(scalar_event(tag, value, step));
  const std::lock_guard lock(mutex_);
  if (kept_.size() + bytes.size() > kMaxKeptBytes && !write()) {
    ++dropped_;
    return;
  }
  kept_ += bytes;
  // In milliseconds, because the largest value of flush_every overflows in the clock's unit.
  if (std::chrono::floor<std::chrono::milliseconds>(Clock::now() - flushed_) >= options_.flush_every) write();
}

bool EventWriter::flush() noexcept {
  const std::lock_guard lock(mutex_);
  return write();
}

int64_t EventWriter::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

bool EventWriter::write() {
  flushed_ = Clock::now();
  // Appends only to whole records, because an incomplete record would hide all later records from readers.
  is_whole_ = is_whole_ || retried([&] { return ::ftruncate(descriptor_, written_bytes_); }) == 0;
  const auto [error_number, is_whole] =
      is_whole_ ? append_all(descriptor_, kept_, written_bytes_) : Appended{errno, false};
  is_whole_ = is_whole;
  if (error_number == 0) {
    written_bytes_ += std::ssize(kept_);
    kept_.clear();
    fails_ = false;
    return true;
  }
  if (!std::exchange(fails_, true))
    tell("EventWriter: cannot write " + path_.string() + ": " + reason(error_number) +
         (is_whole ? "; the points are kept in memory and tried again" : "; it ends in a part of a record"));
  return false;
}

void EventWriter::tell(const std::string& problem) const noexcept {
  try {
    if (options_.on_failure)
      options_.on_failure(problem);
    else
      warn(problem);
  } catch (...) {  // NOLINT(bugprone-empty-catch): lost curves must not end training
  }
}

}  // namespace tessera
