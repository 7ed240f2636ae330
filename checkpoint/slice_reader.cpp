#include "tessera/checkpoint/slice_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/errors.h"

namespace tessera {
namespace {

constexpr int64_t kWindowBytes = int64_t{8} << 20;  // read at a time
constexpr int64_t kPageBytes = 4096;                // the unit of reading where there are no checksums

// numel elements from contiguous memory to every step-th place of the target.
void copy_elements(const char* from, char* to, int64_t numel, int64_t step, int64_t element_bytes) {
  if (step == 1) {
    std::memcpy(to, from, static_cast<size_t>(numel * element_bytes));
    return;
  }
  for (int64_t i = 0; i < numel; ++i)
    std::memcpy(to + i * step * element_bytes, from + i * element_bytes, static_cast<size_t>(element_bytes));
}

}  // namespace

SliceReader::SliceReader(const SavedTensors& saved, Progress progress)
    : saved_(saved), progress_(std::move(progress)) {}

const File& SliceReader::file_of(int index) {
  const auto found = files_.find(index);
  if (found != files_.end()) return found->second;
  const SavedFile& expected = saved_.files[index];
  File file = open_file(saved_.directory / expected.name);
  const std::string where = file.path().string();
  if (file.bytes() != expected.bytes)
    throw CheckpointError(where + ": has " + std::to_string(file.bytes()) + " bytes; expected " +
                          std::to_string(expected.bytes) + (file.bytes() < expected.bytes ? ": it is truncated" : ""));
  if (saved_.block_bytes > 0) {
    std::string header(static_cast<size_t>(expected.header_bytes), '\0');
    file.read(header.data(), expected.header_bytes, 0);
    bytes_read_ += expected.header_bytes;
    if (checksum(header) != expected.header_checksum)
      throw CheckpointError(where + ": the checksum of its header does not match: the file is damaged");
  }
  return files_.emplace(index, std::move(file)).first->second;
}

void SliceReader::verify(const std::string& name, const SavedSlice& slice, Interval interval, const char* data) const {
  if (saved_.block_bytes == 0) return;
  for (int64_t begin = interval.begin; begin < interval.end; begin += saved_.block_bytes) {
    const int64_t end = std::min(begin + saved_.block_bytes, interval.end);
    const uint64_t expected = slice.checksums[begin / saved_.block_bytes];
    const uint64_t got = checksum(data + (begin - interval.begin), end - begin);
    if (got != expected)
      throw CheckpointError((saved_.directory / saved_.files[slice.file].name).string() + ": tensor '" + name +
                            "': bytes " + std::to_string(slice.begin + begin) + " to " +
                            std::to_string(slice.begin + end) + " are damaged: checksum " + to_hex(got) +
                            ", expected " + to_hex(expected));
  }
}

void SliceReader::read_part(const std::string& name, const SavedSlice& slice, const Box& part, char* target,
                            const std::vector<int64_t>& strides, int64_t origin) {
  const SavedTensor& tensor = saved_.tensors.at(name);
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t slice_bytes = bytes_of(tensor, slice);
  const int64_t unit = saved_.block_bytes > 0 ? saved_.block_bytes : kPageBytes;
  const int64_t window = std::max<int64_t>(1, kWindowBytes / unit) * unit;

  std::vector<Run> runs;
  std::vector<Interval> intervals;  // of whole blocks, at most a window each
  for_each_run(part, slice.box, strides, origin, [&](const Run& run) {
    runs.push_back(run);
    int64_t begin = run.source * element_bytes / unit * unit;
    const int64_t end = std::min((run.source + run.numel) * element_bytes, slice_bytes);
    if (!intervals.empty()) begin = std::max(begin, intervals.back().end);
    for (; begin < end; begin += unit) {
      const int64_t block_end = std::min(begin + unit, slice_bytes);
      if (!intervals.empty() && intervals.back().end == begin && block_end - intervals.back().begin <= window) {
        intervals.back().end = block_end;
      } else {
        intervals.push_back({begin, block_end});
      }
    }
  });

  const File& file = file_of(slice.file);
  size_t first = 0;
  for (size_t i = 0; i < intervals.size(); ++i) {
    const Interval& interval = intervals[i];
    if (i + 1 < intervals.size())  // fetched while this one's checksums are taken
      file.start_reading(slice.begin + intervals[i + 1].begin, intervals[i + 1].end - intervals[i + 1].begin);
    while ((runs[first].source + runs[first].numel) * element_bytes <= interval.begin) ++first;
    const Run& run = runs[first];
    const int64_t run_begin = run.source * element_bytes, run_end = run_begin + run.numel * element_bytes;
    // Where the target wants all of it, in this order, it is read there directly.
    const bool direct = run.target_step == 1 && run_begin <= interval.begin && interval.end <= run_end;
    char* data;
    if (direct) {
      data = target + run.target * element_bytes + (interval.begin - run_begin);
    } else {
      buffer_.resize(std::max(buffer_.size(), static_cast<size_t>(interval.end - interval.begin)));
      data = buffer_.data();
    }
    file.read(data, interval.end - interval.begin, slice.begin + interval.begin);
    bytes_read_ += interval.end - interval.begin;
    if (progress_) progress_(interval.end - interval.begin);
    verify(name, slice, interval, data);
    for (size_t r = first; !direct && r < runs.size() && runs[r].source * element_bytes < interval.end; ++r) {
      const Run& piece = runs[r];
      const int64_t begin = std::max(piece.source * element_bytes, interval.begin);
      const int64_t end = std::min((piece.source + piece.numel) * element_bytes, interval.end);
      if (piece.target_step == 1) {
        std::memcpy(target + piece.target * element_bytes + (begin - piece.source * element_bytes),
                    data + (begin - interval.begin), static_cast<size_t>(end - begin));
        continue;
      }
      const int64_t skipped = begin / element_bytes - piece.source;
      copy_elements(data + (begin - interval.begin),
                    target + (piece.target + skipped * piece.target_step) * element_bytes,
                    (end - begin) / element_bytes, piece.target_step, element_bytes);
    }
  }
}

void SliceReader::read(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides,
                       int64_t origin) {
  for (const SavedSlice& slice : saved_.tensors.at(name).slices)
    if (const auto part = intersection(box, slice.box); part && part->numel() > 0)
      read_part(name, slice, *part, static_cast<char*>(target), strides, origin);
}

at::Tensor SliceReader::read(const std::string& name, const Box& box) {
  at::Tensor tensor = at::empty(box.sizes, at::TensorOptions().dtype(saved_.tensors.at(name).dtype));
  const auto strides = row_major_strides(box.sizes);
  int64_t origin = 0;
  for (size_t d = 0; d < strides.size(); ++d) origin += box.offsets[d] * strides[d];
  if (tensor.numel() > 0) read(name, box, tensor.mutable_data_ptr(), strides, origin);
  return tensor;
}

}  // namespace tessera
