#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

namespace tessera {

// Scalars for TensorBoard (torch.utils.tensorboard's SummaryWriter.add_scalar):
//
//   tessera::EventWriter events("runs/first");  // on one rank
//   events.scalar("train/loss", loss, step);
//   // tensorboard --logdir runs
//
// Each writer makes a file of its own in the folder, "events.out.tfevents.<seconds>.<host>.<process>.<number>", and
// only adds to it: runs that go on, and processes that share a folder, never write to each other's, and TensorBoard
// shows them as one curve. What is in the file is whole records (TFRecord: length, checksum, Event message, checksum),
// also after a full disk and, but for the last record, after a kill. Thread-safe.
class EventWriter {
 public:
  // How the file is written.
  struct Options {
    // scalar() writes what has come together once the last write is as old: what a kill loses, at most.
    std::chrono::milliseconds flush_every{5000};
    // Told, by the thread that writes, when writing begins to fail: the file, the reason, what happens next. Must not
    // call the writer. Empty: standard error.
    std::function<void(const std::string& problem)> on_failure{};
  };

  // Makes the folder, and the file in it. Throws std::runtime_error, naming it, if that cannot be.
  explicit EventWriter(const std::filesystem::path& folder, Options options);
  explicit EventWriter(const std::filesystem::path& folder) : EventWriter(folder, Options()) {}
  ~EventWriter();  // flushes
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  // One point of the curve `tag` ("train/loss": what is before the slash groups curves); stored as fp32, with the time
  // of the call. NaN and infinities are shown as such. Not collective. Throws nothing because of the disk: a training
  // does not end for its curves.
  void scalar(std::string_view tag, double value, int64_t step);

  // Writes what has come together. False if the disk refuses: the file is then whole records as before, and what was
  // not written is kept, up to kMaxKeptBytes, for the next try; beyond it the newest points are dropped.
  bool flush() noexcept;

  // The points that were dropped.
  int64_t dropped() const;

  // The file.
  const std::filesystem::path& path() const { return path_; }

  static constexpr size_t kMaxKeptBytes = size_t{4} << 20;  // some 70,000 points

 private:
  using Clock = std::chrono::steady_clock;
  bool write();  // under mutex_
  void tell(const std::string& problem) const noexcept;

  const Options options_;
  std::filesystem::path path_;
  mutable std::mutex mutex_;  // guards what follows
  int descriptor_ = -1;
  int64_t written_bytes_ = 0;  // whole records
  std::string kept_;           // records that are not in the file yet
  Clock::time_point flushed_ = Clock::now();
  bool fails_ = false;
  int64_t dropped_ = 0;
};

}  // namespace tessera
