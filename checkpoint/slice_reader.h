#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/saved_tensors.h"
#include "tessera/checkpoint/shard_writer.h"

namespace tessera {

// Reads parts of saved tensors, and only the blocks that they lie in; verifies every block and the
// header of every file it reads from. Everything throws CheckpointError with file, tensor and
// reason. One thread at a time.
class SliceReader {
 public:
  // `saved` has to pass check_saved_tensors() and outlive the reader.
  explicit SliceReader(const SavedTensors& saved, Progress progress = {});

  // Reads a box of a tensor to where the element of index i is at sum(i * strides) - origin of
  // `target`, in elements of the tensor's dtype.
  void read(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides, int64_t origin);

  // The whole box, row-major, as a new tensor.
  at::Tensor read(const std::string& name, const Box& box);

  // Opens a file, if it is not yet open, and verifies its size and header.
  void open(int file) { file_of(file); }

  // Bytes read from files so far.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  struct Interval {  // of a slice's bytes
    int64_t begin, end;
  };
  const File& file_of(int index);
  void read_part(const std::string& name, const SavedSlice& slice, const Box& part, char* target,
                 const std::vector<int64_t>& strides, int64_t origin);
  void verify(const std::string& name, const SavedSlice& slice, Interval interval, const char* data) const;

  const SavedTensors& saved_;
  Progress progress_;
  std::map<int, File> files_;
  std::vector<char> buffer_;
  int64_t bytes_read_ = 0;
};

}  // namespace tessera
