#include "tessera/checkpoint/offline.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isnan.h>

#include <cmath>
#include <stdexcept>

#include "tessera/checkpoint/commit.h"
#include "tessera/checkpoint/dtype.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/load_plan.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/slice_reader.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kWholeBytes = int64_t{64} << 10;  // tensors up to this are not cut

bool is_checkpoint(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path / kManifestName, ignored);
}

Manifest manifest_of(const fs::path& directory) {
  if (!is_checkpoint(directory)) throw CheckpointError(explain_missing(directory));
  return read_manifest(directory);
}

// What one of `ranks` ranks writes of a checkpoint. Small tensors go round.
std::vector<Piece> pieces_for(const SavedTensors& saved, int rank, int ranks, SliceReader& reader) {
  std::vector<Piece> pieces;
  int64_t index = 0;
  for (const auto& [name, tensor] : saved.tensors) {
    std::vector<Box> boxes;
    const int64_t numel = numel_of(tensor.shape);
    if (bytes_of(tensor) <= kWholeBytes) {
      if (index++ % ranks == rank) boxes.push_back(whole_box(tensor.shape));
    } else {
      boxes = boxes_of_range(tensor.shape, {numel / ranks * rank + std::min<int64_t>(rank, numel % ranks),
                                            numel / ranks * (rank + 1) + std::min<int64_t>(rank + 1, numel % ranks)});
    }
    for (const Box& box : boxes)
      pieces.push_back({name, tensor.dtype, tensor.shape, tensor.aliases, tensor.kind, box,
                        [&reader, key = name, box] { return reader.read(key, box); }});
  }
  return pieces;
}

TensorDifference compare(const std::string& name, const at::Tensor& a, const at::Tensor& b) {
  TensorDifference difference{.name = name};
  const auto width = static_cast<int64_t>(a.element_size());
  if (a.numel() == 0) return difference;
  // Bits, so that a NaN equals itself and 0 is not -0.
  const at::Tensor changed = a.reshape({-1, 1})
                                 .view(at::kByte)
                                 .view({-1, width})
                                 .ne(b.reshape({-1, 1}).view(at::kByte).view({-1, width}))
                                 .any(1);
  difference.different_numel = changed.sum().item<int64_t>();
  if (difference.different_numel == 0 || a.is_complex()) return difference;
  difference.max_difference = (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
  return difference;
}

}  // namespace

SavedTensors find_tensors(const fs::path& path) {
  return is_checkpoint(path) ? read_manifest(path).saved : find_full_tensors(path);
}

int64_t total_bytes(const SavedTensors& saved) {
  int64_t total = 0;
  for (const auto& [name, tensor] : saved.tensors) total += bytes_of(tensor);
  return total;
}

void consolidate_checkpoint(const fs::path& from, const fs::path& to, bool state, const SaveFullOptions& options,
                            const Progress& progress) {
  const Manifest manifest = manifest_of(from);
  SliceReader reader(manifest.saved, progress);
  std::vector<FullTensor> tensors;
  for (const auto& [name, tensor] : manifest.saved.tensors)
    if (state || tensor.kind != TensorKind::kState)
      tensors.push_back({name, tensor.dtype, tensor.shape, tensor.aliases});
  write_full(
      to, tensors, [&](const FullTensor& tensor) { return reader.read(tensor.name, whole_box(tensor.shape)); },
      options);
}

void reshard_checkpoint(const fs::path& from, const fs::path& to, int ranks, const Progress& progress) {
  if (ranks < 1 || ranks > 99999)
    throw std::invalid_argument("ranks is " + std::to_string(ranks) + ", expected 1 to 99999");
  Manifest manifest = manifest_of(from);
  const SavedTensors saved = manifest.saved;
  PartialCheckpoint partial(to);
  SliceReader reader(saved, progress);
  manifest.saved = {.block_bytes = saved.block_bytes};
  for (int rank = 0; rank < ranks; ++rank)
    append(manifest.saved, write_pieces(partial.path(), "rank-" + five_digits(rank),
                                        pieces_for(saved, rank, ranks, reader), saved.block_bytes));
  if (ranks != manifest.world_size) manifest.rng.clear();
  manifest.world_size = ranks;
  partial.commit(std::move(manifest));
}

std::vector<TensorDifference> diff_checkpoints(const fs::path& a, const fs::path& b, const Progress& progress) {
  const SavedTensors first = find_tensors(a), second = find_tensors(b);
  SliceReader first_reader(first, progress), second_reader(second, progress);
  std::vector<TensorDifference> differences;
  auto add = [&](const std::string& name, const std::string& reason) {
    differences.push_back({.name = name, .reason = reason});
  };
  for (const auto& [name, tensor] : first.tensors) {
    const auto found = second.tensors.find(name);
    if (found == second.tensors.end()) {
      add(name, "only in " + a.string());
    } else if (found->second.shape != tensor.shape) {
      add(name, "shape " + to_string(tensor.shape) + " and " + to_string(found->second.shape));
    } else if (found->second.dtype != tensor.dtype) {
      add(name,
          "dtype " + safetensors_name(tensor.dtype).value() + " and " + safetensors_name(found->second.dtype).value());
    } else {
      auto difference = compare(name, first_reader.read(name, whole_box(tensor.shape)),
                                second_reader.read(name, whole_box(tensor.shape)));
      if (difference.different_numel > 0) differences.push_back(std::move(difference));
    }
  }
  for (const auto& [name, tensor] : second.tensors)
    if (!first.tensors.contains(name)) add(name, "only in " + b.string());
  if (is_checkpoint(a) && is_checkpoint(b)) {
    const Manifest one = read_manifest(a), two = read_manifest(b);
    auto text = [](const Manifest& manifest) {
      return manifest.optimizer ? optimizer_to_json(*manifest.optimizer) : nlohmann::json();
    };
    if (text(one) != text(two)) add("(optimizer)", "kind, groups, options or steps");
    if (one.extra != two.extra) add("(extra)", one.extra.dump() + " and " + two.extra.dump());
  }
  return differences;
}

}  // namespace tessera
