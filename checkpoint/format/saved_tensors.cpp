#include "checkpoint/format/saved_tensors.h"

#include <algorithm>
#include <tuple>

#include <tessera/errors.h>
#include "checkpoint/format/safetensors_header.h"

namespace tessera::internal {
namespace {

class Checker {
 public:
  Checker(const SavedTensors& saved, const std::string& where) : saved_(saved), where_(where) {}

  void check() {
    for (const auto& [name, tensor] : saved_.tensors) {
      name_ = &name;
      if (!tensor_bytes(tensor.shape, tensor.dtype)) refuse("the shape " + to_string(tensor.shape) + " is too large");
      if (saved_.by_rank) {
        check_runs(tensor);
        continue;
      }
      for (const auto& slice : tensor.slices) check_slice(tensor, slice);
      check_cover(tensor);
    }
    check_bytes_apart();
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw CheckpointError(where_ + ": tensor '" + *name_ + "': " + reason);
  }

  void check_slice(const SavedTensor& tensor, const SavedSlice& slice) {
    const Box& box = slice.box;
    if (slice.file < 0 || slice.file >= static_cast<int>(saved_.files.size()))
      refuse("a slice is in file number " + std::to_string(slice.file) + " of " + std::to_string(saved_.files.size()));
    const SavedFile& file = saved_.files[slice.file];
    if (box.offsets.size() != tensor.shape.size() || box.sizes.size() != tensor.shape.size())
      refuse("a slice in " + file.name + " has another number of dimensions than " + to_string(tensor.shape));
    for (size_t d = 0; d < tensor.shape.size(); ++d)
      if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.offsets[d] > tensor.shape[d] ||
          box.sizes[d] > tensor.shape[d] - box.offsets[d])
        refuse("a slice in " + file.name + " at " + to_string(box.offsets) + " of " + to_string(box.sizes) +
               " is outside the shape " + to_string(tensor.shape));
    const int64_t bytes = bytes_of(tensor, slice);
    if (slice.begin < file.header_bytes || slice.begin > file.bytes || bytes > file.bytes - slice.begin)
      refuse("the slice " + to_string(box) + " ends outside " + file.name);
    const int64_t blocks = saved_.block_bytes == 0 ? 0 : (bytes + saved_.block_bytes - 1) / saved_.block_bytes;
    if (static_cast<int64_t>(slice.checksums.size()) != blocks)
      refuse("the slice " + to_string(box) + " has " + std::to_string(slice.checksums.size()) +
             " checksums; expected " + std::to_string(blocks));
    used_.push_back({slice.file, slice.begin, bytes, name_});
  }

  void check_runs(const SavedTensor& tensor) const {
    const int64_t numel = numel_of(tensor.shape);
    if (!tensor.order.empty()) {
      std::vector<int64_t> sorted = tensor.order;
      std::ranges::sort(sorted);
      for (size_t d = 0; d < sorted.size(); ++d)
        if (sorted.size() != tensor.shape.size() || sorted[d] != static_cast<int64_t>(d))
          refuse("its order " + to_string(tensor.order) + " is not one of the dimensions of " +
                 to_string(tensor.shape));
    }
    int64_t covered = 0;
    for (const RankRun& run : tensor.runs) {
      if (run.count < 1 || run.count > saved_.world_size || run.rank >= saved_.world_size ||
          (run.count > 1 && run.rank_step > (saved_.world_size - 1 - run.rank) / (run.count - 1)))
        refuse("a run of ranks is outside the world of " + std::to_string(saved_.world_size));
      if (run.begin != covered)
        refuse("a run of ranks begins at element " + std::to_string(run.begin) + ", expected " +
               std::to_string(covered));
      if (numel > 0 && (run.numel < 1 || run.count > (numel - covered) / run.numel))
        refuse("a run of ranks ends outside its " + std::to_string(numel) + " elements");
      covered += run.count * run.numel;
    }
    const bool one_without = numel > 0 || (tensor.runs.size() == 1 && tensor.runs[0] == RankRun{tensor.runs[0].rank});
    if (covered != numel || tensor.runs.empty() || !one_without)
      refuse("its ranks have " + std::to_string(covered) + " of its " + std::to_string(numel) + " elements");
  }

  // Checks that the slices cover the tensor: no two overlap, and all together have as many elements as the tensor.
  void check_cover(const SavedTensor& tensor) const {
    int64_t covered = 0;
    std::vector<const Box*> boxes;
    for (const auto& slice : tensor.slices) {
      covered += slice.box.numel();
      if (slice.box.numel() > 0) boxes.push_back(&slice.box);
    }
    // Compares each box only with the few earlier boxes that extend beyond its start in the first dimension.
    std::ranges::sort(boxes, [](const Box* a, const Box* b) { return a->offsets < b->offsets; });
    std::vector<const Box*> open;
    for (const Box* box : boxes) {
      std::erase_if(open, [&](const Box* other) {
        return !tensor.shape.empty() && other->offsets[0] + other->sizes[0] <= box->offsets[0];
      });
      for (const Box* other : open)
        if (intersection(*box, *other))
          refuse("the slices " + to_string(*other) + " and " + to_string(*box) + " overlap");
      open.push_back(box);
    }
    const int64_t numel = numel_of(tensor.shape);
    if (covered != numel || tensor.slices.empty())
      refuse("its slices have " + std::to_string(covered) + " of its " + std::to_string(numel) + " elements");
  }

  void check_bytes_apart() {
    std::ranges::sort(used_, [](const UsedBytes& a, const UsedBytes& b) {
      return std::tie(a.file, a.begin, a.bytes) < std::tie(b.file, b.begin, b.bytes);
    });
    for (size_t i = 1; i < used_.size(); ++i) {
      name_ = used_[i].name;
      if (used_[i].file == used_[i - 1].file && used_[i].begin < used_[i - 1].begin + used_[i - 1].bytes)
        refuse("shares bytes of " + saved_.files[used_[i].file].name + " with '" + *used_[i - 1].name + "'");
    }
  }

  struct UsedBytes {
    int file;
    int64_t begin, bytes;
    const std::string* name;
  };
  const SavedTensors& saved_;
  const std::string& where_;
  const std::string* name_ = nullptr;
  std::vector<UsedBytes> used_;
};

}  // namespace

void check_saved_tensors(const SavedTensors& saved, const std::string& where) { Checker(saved, where).check(); }

int64_t bytes_of(const SavedTensors& saved) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : saved.tensors) bytes += bytes_of(tensor);
  return bytes;
}

int64_t bytes_of(const SavedTensor& tensor) { return tensor_bytes(tensor.shape, tensor.dtype).value(); }

int64_t bytes_of(const SavedTensor& tensor, const SavedSlice& slice) {
  return slice.box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

}  // namespace tessera::internal
