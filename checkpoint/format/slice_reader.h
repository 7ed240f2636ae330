#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/entries.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/saved_tensors.h"
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// Reads boxes of saved tensors from files. Reads only the blocks that contain elements of the boxes. Verifies checksums
// of these blocks and of file headers, if there are any. Keeps at most 16 files open. Must be used by one thread at a
// time. On failure, throws CheckpointError with the file, the tensor and the reason.
class SliceReader {
 public:
  // `saved` must pass check_saved_tensors() and outlive the reader. fetch() reads on up to `threads` threads.
  explicit SliceReader(const SavedTensors& saved, Progress progress = {}, int threads = 1);

  // Schedules a box of the tensor `name`, which must exist. `target`, an array of the saved dtype, must stay valid
  // until fetch(). fetch() writes an element to target[sum(i * strides) - origin], where i is its index in the whole
  // tensor.
  void want(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides, int64_t origin);
  // Reads all scheduled boxes, one file after the other, and opens each file only once.
  void fetch();

  // Schedules a box with want(), and calls fetch().
  void read(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides, int64_t origin);
  // Reads the box into a new row-major tensor in host memory.
  at::Tensor read(const std::string& name, const Box& box);

  // Opens the file with this index in SavedTensors::files. Verifies its size and, if known, its header's checksum.
  void open(int file) { listed_file(file); }

  int64_t bytes_read() const { return bytes_read_; }

 private:
  // A scheduled part of a slice.
  struct Wanted {
    const std::string* name;
    const SavedTensor* tensor;
    const SavedSlice* slice;  // null: fetch_file() reads it from the rank file's header
    Box box;                  // the slice's box
    Box part;
    char* target;
    std::vector<int64_t> strides;
    int64_t origin;
  };
  // A scheduled part with its slice, its runs and the byte ranges to read.
  struct Part {
    const Wanted* wanted;
    SavedSlice slice;
    int64_t element_bytes;
    std::vector<Run> runs;
    std::vector<Range> intervals;
  };
  using FileKey = std::pair<int64_t, size_t>;  // {index in SavedTensors::files, 0}, or {rank, number of its file}

  const InputFile& listed_file(int index);
  void fetch_file(const FileKey& key, const std::vector<Wanted>& wanted);
  using Interval = std::pair<const Part*, size_t>;  // a part, and the index of one of its intervals
  void read_parts(const InputFile& file, const std::vector<Part>& parts);
  void read_on_threads(const InputFile& file, const std::vector<Interval>& intervals, int64_t bytes);
  void read_interval(const InputFile& file, const Part& part, size_t index, std::vector<char>& buffer);
  // Returns the slice's byte ranges that cover the runs: whole blocks, at most window_bytes_ (or one block) per range.
  std::vector<Range> intervals_of(const std::vector<Run>& runs, int64_t element_bytes, int64_t slice_bytes) const;
  void verify(const InputFile& file, const Part& part, Range interval, const char* data) const;

  const SavedTensors& saved_;
  const Progress progress_;
  const int threads_;
  const int64_t window_bytes_;  // maximum size of one read, unless a block is larger
  std::map<FileKey, std::vector<Wanted>> wanted_;
  std::map<int, std::unique_ptr<InputFile>> files_;  // open files; the key is the index in SavedTensors::files
  std::vector<bool> verified_;                       // whether the header of each of SavedTensors::files was verified
  std::vector<char> buffer_;
  std::atomic<int64_t> bytes_read_ = 0;
};

}  // namespace tessera::internal
