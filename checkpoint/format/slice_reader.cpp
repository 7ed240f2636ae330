#include "checkpoint/format/slice_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"

namespace tessera::internal {
namespace {

constexpr int64_t kPageBytes = 4096;                   // block size for reads from files without checksums
constexpr size_t kOpenFiles = 16;                      // maximum number of files kept open between reads
constexpr int64_t kThreadedBytes = int64_t{16} << 20;  // below this size, several threads read no faster than one

// Copies the elements of `run` that are in `data` (the elements `read` of a slice) to their places in `target`.
void copy_run(const Run& run, const char* data, Range read, char* target, int64_t element_bytes) {
  const int64_t begin = std::max(run.source, read.begin), end = std::min(run.source + run.numel, read.end);
  const char* from = data + (begin - read.begin) * element_bytes;
  char* to = target + (run.target + (begin - run.source) * run.target_step) * element_bytes;
  if (run.target_step == 1) {
    std::memcpy(to, from, static_cast<size_t>((end - begin) * element_bytes));
    return;
  }
  for (int64_t i = 0; i < end - begin; ++i)
    std::memcpy(to + i * run.target_step * element_bytes, from + i * element_bytes, static_cast<size_t>(element_bytes));
}

}  // namespace

SliceReader::SliceReader(const SavedTensors& saved, Progress progress, int threads)
    : saved_(saved),
      progress_(std::move(progress)),
      threads_(threads),
      window_bytes_(storage_of(saved.directory).reading_bytes()),
      verified_(saved.files.size()) {}

const InputFile& SliceReader::listed_file(int index) {
  const auto found = files_.find(index);
  if (found != files_.end()) return *found->second;
  if (files_.size() >= kOpenFiles) files_.erase(files_.begin());
  const SavedFile& expected = saved_.files[index];
  auto file = open_file(saved_.directory / expected.name);
  const std::string where = file->path().string();
  if (file->bytes() != expected.bytes)
    throw CheckpointError(where + ": has " + std::to_string(file->bytes()) + " bytes; expected " +
                          std::to_string(expected.bytes) + (file->bytes() < expected.bytes ? ": it is truncated" : ""));
  if (saved_.block_bytes > 0 && !verified_[index]) {
    std::string header(static_cast<size_t>(expected.header_bytes), '\0');
    file->read(header.data(), expected.header_bytes, 0);
    bytes_read_ += expected.header_bytes;
    if (checksum(header) != expected.header_checksum)
      throw CheckpointError(where + ": the checksum of its header does not match: the file is damaged");
    verified_[index] = true;
  }
  return *files_.emplace(index, std::move(file)).first->second;
}

void SliceReader::verify(const InputFile& file, const Part& part, Range interval, const char* data) const {
  if (saved_.block_bytes == 0) return;
  for (int64_t begin = interval.begin; begin < interval.end; begin += saved_.block_bytes) {
    const int64_t end = std::min(begin + saved_.block_bytes, interval.end);
    const uint64_t expected = part.slice.checksums[begin / saved_.block_bytes];
    const uint64_t got = checksum(data + (begin - interval.begin), end - begin);
    if (got != expected)
      throw CheckpointError(file.path().string() + ": tensor '" + *part.wanted->name + "': bytes " +
                            std::to_string(part.slice.begin + begin) + " to " + std::to_string(part.slice.begin + end) +
                            " are damaged: checksum " + to_hex(got) + ", expected " + to_hex(expected));
  }
}

std::vector<Range> SliceReader::intervals_of(const std::vector<Run>& runs, int64_t element_bytes,
                                             int64_t slice_bytes) const {
  const int64_t unit = saved_.block_bytes > 0 ? saved_.block_bytes : kPageBytes;
  const int64_t window = std::max<int64_t>(1, window_bytes_ / unit) * unit;
  std::vector<Range> intervals;
  for (const Run& run : runs) {
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
  }
  return intervals;
}

void SliceReader::read_interval(const InputFile& file, const Part& part, size_t index, std::vector<char>& buffer) {
  const auto [begin, end] = part.intervals[index];
  const int64_t element_bytes = part.element_bytes;
  auto first = std::partition_point(part.runs.begin(), part.runs.end(), [&, from = begin](const Run& run) {
    return (run.source + run.numel) * element_bytes <= from;
  });
  const int64_t run_begin = first->source * element_bytes, run_end = run_begin + first->numel * element_bytes;
  // Reads directly into the target if a run that is contiguous in the target contains the whole interval.
  const bool direct = first->target_step == 1 && run_begin <= begin && end <= run_end;
  char* target = part.wanted->target;
  if (!direct) buffer.resize(std::max(buffer.size(), static_cast<size_t>(end - begin)));
  char* data = direct ? target + first->target * element_bytes + (begin - run_begin) : buffer.data();
  file.read(data, end - begin, part.slice.begin + begin);
  bytes_read_ += end - begin;
  verify(file, part, part.intervals[index], data);
  for (auto run = first; !direct && run != part.runs.end() && run->source * element_bytes < end; ++run)
    copy_run(*run, data, {begin / element_bytes, end / element_bytes}, target, element_bytes);
}

void SliceReader::read_parts(const InputFile& file, const std::vector<Part>& parts) {
  std::vector<Interval> intervals;
  int64_t bytes = 0;
  for (const Part& part : parts)
    for (size_t i = 0; i < part.intervals.size(); ++i) {
      intervals.emplace_back(&part, i);
      bytes += part.intervals[i].end - part.intervals[i].begin;
    }
  if (threads_ == 1 || bytes < kThreadedBytes) {
    for (const auto& [part, i] : intervals) {
      read_interval(file, *part, i, buffer_);
      if (progress_) progress_(part->intervals[i].end - part->intervals[i].begin);
    }
    return;
  }
  read_on_threads(file, intervals, bytes);
  if (progress_) progress_(bytes);
}

// Each thread reads its own section of the file sequentially, because interleaved reads would defeat the system's
// read-ahead. Some threads compute checksums while others wait for the disk. All write to disjoint target memory.
void SliceReader::read_on_threads(const InputFile& file, const std::vector<Interval>& intervals, int64_t bytes) {
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::exception_ptr error;
  auto work = [&](size_t begin, size_t end) {
    std::vector<char> buffer;
    try {
      const auto own = file.for_another_thread();
      for (size_t i = begin; i < end && !failed; ++i)
        read_interval(own ? *own : file, *intervals[i].first, intervals[i].second, buffer);
    } catch (...) {
      failed = true;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    size_t begin = 0;
    int64_t taken = 0;
    for (int t = 1; t <= threads_; ++t) {
      size_t end = begin;
      for (; end < intervals.size() && taken < bytes / threads_ * t; ++end) {
        const auto [from, to] = intervals[end].first->intervals[intervals[end].second];
        taken += to - from;
      }
      if (t == threads_)
        work(begin, intervals.size());
      else
        others.emplace_back(work, std::exchange(begin, end), end);
    }
  }
  if (error) std::rethrow_exception(error);
}

void SliceReader::fetch_file(const FileKey& key, const std::vector<Wanted>& wanted) {
  std::unique_ptr<InputFile> own;
  if (saved_.by_rank) own = open_file(saved_.directory / rank_file_name(key.first, key.second));
  const InputFile& file = own ? *own : listed_file(static_cast<int>(key.first));
  std::optional<RankFile> rank_file;
  if (own) {
    rank_file.emplace(read_rank_file(file, saved_, key.first));
    bytes_read_ += rank_file->header_bytes;
  }
  std::vector<Part> parts;
  for (const Wanted& each : wanted) {
    SavedSlice slice =
        own ? rank_file->slice(*each.name, *each.tensor, each.box, saved_.block_bytes, file.path().string())
            : *each.slice;
    Part& part = parts.emplace_back(
        Part{&each, std::move(slice), static_cast<int64_t>(c10::elementSize(each.tensor->dtype)), {}, {}});
    for_each_run(each.part, each.box, each.strides, each.origin, [&](const Run& run) { part.runs.push_back(run); });
    part.intervals = intervals_of(part.runs, part.element_bytes, bytes_of(*each.tensor, part.slice));
  }
  std::ranges::sort(parts, [](const Part& a, const Part& b) { return a.slice.begin < b.slice.begin; });
  read_parts(file, parts);
}

void SliceReader::want(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides,
                       int64_t origin) {
  const auto found = saved_.tensors.find(name);
  const SavedTensor& tensor = found->second;
  auto add = [&](const FileKey& key, const SavedSlice* slice, const Box& whole) {
    if (auto part = intersection(box, whole); part && part->numel() > 0)
      wanted_[key].push_back(
          {&found->first, &tensor, slice, whole, *part, static_cast<char*>(target), strides, origin});
  };
  for (const SavedSlice& slice : tensor.slices) add({slice.file, 0}, &slice, slice.box);
  if (!saved_.by_rank || box.numel() == 0) return;
  for_each_holder(tensor, range_of_box(tensor, box), [&](int64_t rank, Range held) {
    const auto boxes = boxes_by_file(tensor, held);
    for (size_t k = 0; k < boxes.size(); ++k) add({rank, k}, nullptr, boxes[k]);
  });
}

void SliceReader::fetch() {
  const auto wanted = std::exchange(wanted_, {});
  for (const auto& [key, parts] : wanted) fetch_file(key, parts);
}

void SliceReader::read(const std::string& name, const Box& box, void* target, const std::vector<int64_t>& strides,
                       int64_t origin) {
  want(name, box, target, strides, origin);
  fetch();
}

at::Tensor SliceReader::read(const std::string& name, const Box& box) {
  at::Tensor tensor = at::empty(box.sizes, at::TensorOptions(at::kCPU).dtype(saved_.tensors.at(name).dtype));
  const auto strides = row_major_strides(box.sizes);
  int64_t origin = 0;
  for (size_t d = 0; d < strides.size(); ++d) origin += box.offsets[d] * strides[d];
  if (tensor.numel() > 0) read(name, box, tensor.mutable_data_ptr(), strides, origin);
  return tensor;
}

}  // namespace tessera::internal
