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

// Reads parts of saved tensors, and only the blocks that they lie in; verifies every block and the header of every file
// it reads from. Files are open while they are needed, few at a time. Everything throws CheckpointError with file,
// tensor and reason. Called by one thread at a time.
class SliceReader {
 public:
  // `saved` has to pass check_saved_tensors() and outlive the reader. fetch() reads on up to `threads` threads.
  explicit SliceReader(const SavedTensors& saved, Progress progress = {}, int threads = 1);

  // Notes that fetch() is to read a box of a tensor to where the element of index i is at sum(i * strides) - origin of
  // `target`, in elements of the tensor's dtype.
  void want(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides, int64_t origin);
  // Reads all that is wanted, file by file, in the order of the files; each file is opened once.
  void fetch();

  // Both at once.
  void read(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides, int64_t origin);
  // The whole box, row-major, as a new tensor.
  at::Tensor read(const std::string& name, const Box& box);

  // Opens a listed file, if it is not yet open, and verifies its size and header.
  void open(int file) { listed_file(file); }

  // Bytes read from files so far.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  // A part of a slice that is wanted.
  struct Wanted {
    const std::string* name;
    const SavedTensor* tensor;
    const SavedSlice* slice;  // null: box `box` of a rank's file
    Box box;                  // the slice's
    Box part;
    char* target;
    std::vector<int64_t> strides;
    int64_t origin;
  };
  // The same, with where it lies and which bytes are read.
  struct Part {
    const Wanted* wanted;
    SavedSlice slice;
    int64_t element_bytes;
    std::vector<Run> runs;
    std::vector<Range> intervals;
  };
  using FileKey = std::pair<int64_t, size_t>;  // a listed file's index, 0; or a rank, and the number of its file

  const InputFile& listed_file(int index);
  void fetch_file(const FileKey& key, const std::vector<Wanted>& wanted);
  using Interval = std::pair<const Part*, size_t>;  // a part's so-manyth
  void read_parts(const InputFile& file, const std::vector<Part>& parts);
  void read_on_threads(const InputFile& file, const std::vector<Interval>& intervals, int64_t bytes);
  void read_interval(const InputFile& file, const Part& part, size_t index, std::vector<char>& buffer);
  // The bytes of a slice that are read for the runs: whole blocks, at most a window each.
  std::vector<Range> intervals_of(const std::vector<Run>& runs, int64_t element_bytes, int64_t slice_bytes) const;
  void verify(const InputFile& file, const Part& part, Range interval, const char* data) const;

  const SavedTensors& saved_;
  const Progress progress_;
  const int threads_;
  const int64_t window_bytes_;  // read at a time
  std::map<FileKey, std::vector<Wanted>> wanted_;
  std::map<int, std::unique_ptr<InputFile>> files_;  // listed ones that are open
  std::vector<bool> verified_;                       // headers of listed ones
  std::vector<char> buffer_;
  std::atomic<int64_t> bytes_read_ = 0;
};

}  // namespace tessera::internal
