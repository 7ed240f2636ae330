#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

namespace tessera {

// Writes scalars to files for TensorBoard, like SummaryWriter.add_scalar of torch.utils.tensorboard:
//
//   tessera::EventWriter events("runs/first");  // on one rank
//   events.scalar("train/loss", loss, step);
//   // tensorboard --logdir runs
//
// Each writer creates its own file in the folder, "events.out.tfevents.<seconds>.<host>.<process>.<number>", and only
// appends to the file. So resumed runs, and processes that share a folder, write separate files. TensorBoard shows
// these files as one curve. A file contains only complete records (TFRecord: length, checksum, Event message,
// checksum), even if the disk is full. After a kill of the process, the last record may be incomplete. Thread-safe.
class EventWriter {
 public:
  // When to write points to the file, and where to report failures of writes.
  struct Options {
    // scalar() writes pending records if the last write is at least this old. If the process is killed, at most the
    // pending records are lost.
    std::chrono::milliseconds flush_every{5000};
    // Called by the writing thread when writes begin to fail. The text has the file, the reason and the consequence.
    // Must not call the writer. Empty: the text becomes a warning (errors.h).
    std::function<void(const std::string& problem)> on_failure{};
  };

  // Creates the folder and the file. If that fails, throws std::runtime_error with the path.
  explicit EventWriter(const std::filesystem::path& folder, Options options);
  explicit EventWriter(const std::filesystem::path& folder) : EventWriter(folder, Options()) {}
  ~EventWriter();  // flushes
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  // Adds a point to the curve `tag`. TensorBoard groups curves by the part of `tag` before the slash: "train/loss". The
  // value is stored as fp32, with the time of the call. TensorBoard displays NaN and infinities as such. Not
  // collective. Does not throw if the disk is full, so that logging cannot end the training.
  void scalar(std::string_view tag, double value, int64_t step);

  // Writes pending records. If the write fails, returns false, and cuts an incomplete record off the file. Pending
  // records are kept for the next write, up to kMaxKeptBytes; beyond that, the newest points are dropped.
  bool flush() noexcept;

  int64_t dropped() const;                                     // number of points that were dropped
  const std::filesystem::path& path() const { return path_; }  // path of the file

  static constexpr size_t kMaxKeptBytes = size_t{4} << 20;  // about 70,000 points

 private:
  using Clock = std::chrono::steady_clock;
  bool write();  // `mutex_` must be locked; returns false if the write failed
  void tell(const std::string& problem) const noexcept;

  const Options options_;
  const int process_;  // a child of fork() does not write its parent's points
  std::filesystem::path path_;
  mutable std::mutex mutex_;  // guards all members below
  int descriptor_ = -1;
  int64_t written_bytes_ = 0;  // size of the file's complete records
  std::string kept_;           // records that are not written yet
  Clock::time_point flushed_ = Clock::now();
  bool fails_ = false, is_whole_ = true;  // is_whole_: the file ends with a whole record
  int64_t dropped_ = 0;
};

}  // namespace tessera
