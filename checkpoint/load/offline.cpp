#include "checkpoint/load/offline.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <tessera/errors.h>
#include "checkpoint/format/entries.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/save/commit.h"
#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kWholeBytes = int64_t{64} << 10;  // tensors up to this size are not split

// Returns the pieces that rank `rank` of `ranks` writes: a share of each large tensor, and small tensors in turn.
std::vector<Piece> pieces_for(const SavedTensors& saved, int rank, int ranks, SliceReader& reader) {
  std::vector<Piece> pieces;
  int64_t index = 0;
  for (const auto& [name, tensor] : saved.tensors) {
    const int64_t numel = numel_of(tensor.shape);
    auto begin_of = [&](int r) { return numel / ranks * r + std::min<int64_t>(r, numel % ranks); };
    Range held{0, 0};
    if (bytes_of(tensor) > kWholeBytes) {
      held = {begin_of(rank), begin_of(rank + 1)};
    } else if (index++ % ranks == rank) {
      held = {0, numel};
    } else {
      continue;
    }
    auto segments = segments_of(tensor.shape, memory_strides(tensor), held);
    if (numel == 0) segments = {{whole_box(tensor.shape), {0, 0}}};
    for (const Segment& segment : segments)
      pieces.push_back({name, tensor.dtype, tensor.shape, tensor.aliases, tensor.kind, segment.box,
                        [&reader, key = name, box = segment.box] { return reader.read(key, box); }, segment.memory,
                        tensor.order});
  }
  return pieces;
}

using SlicesByName = std::map<std::string, std::pair<const SavedTensor*, const SavedSlice*>>;

// Compares a file's header with the slices that the manifest lists for the file. Appends each difference to `problems`.
void compare_header(const InputFile& file, const SlicesByName& slices, std::vector<std::string>& problems) {
  const std::string where = file.path().string();
  std::set<std::string> seen;
  for (const auto& entry : read_safetensors_header(file).entries) {
    seen.insert(entry.name);
    const auto found = slices.find(entry.name);
    if (found == slices.end() && entry.bytes == 0) continue;  // an empty tensor, which several ranks may have written
    if (found == slices.end()) {
      problems.push_back(where + ": tensor '" + entry.name + "' is not in the manifest");
    } else if (const auto& [tensor, slice] = found->second;
               entry.dtype != tensor->dtype || entry.shape != slice->box.sizes || entry.begin != slice->begin) {
      problems.push_back(where + ": tensor '" + entry.name + "' is not where, or what, the manifest says");
    }
  }
  for (const auto& [name, slice] : slices)
    if (!seen.contains(name))
      problems.push_back(where + ": has no tensor '" + name + "', which the manifest says it has");
}

void compare_block(TensorDifference& difference, const at::Tensor& a, const at::Tensor& b, double tolerance) {
  // Compares bits, so that equal NaNs do not count as a difference.
  auto bytes = [](const at::Tensor& tensor) { return tensor.reshape({-1, 1}).view(at::kByte); };
  at::Tensor differs = bytes(a).ne(bytes(b)).any(1);
  if (!differs.any().item<bool>()) return;
  const auto exact = a.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor distance = (a.to(exact) - b.to(exact)).abs().reshape({-1});
  if (tolerance > 0) differs = differs.logical_and(distance.le(tolerance).logical_not());  // NaN exceeds any tolerance
  const int64_t numel = differs.sum().item<int64_t>();
  if (numel == 0) return;
  difference.different_numel += numel;
  const double most = distance.masked_select(differs).max().item<double>();
  if (!std::isnan(difference.max_difference) && !(difference.max_difference >= most)) difference.max_difference = most;
}

TensorDifference compare(const std::string& name, const std::vector<int64_t>& shape, SliceReader& a, SliceReader& b,
                         double tolerance) {
  constexpr int64_t kBlockNumel = int64_t{1} << 20;
  TensorDifference difference{.name = name};
  const int64_t numel = numel_of(shape);
  for (int64_t begin = 0; begin < numel; begin += kBlockNumel)
    for (const Box& box : boxes_of_range(shape, {begin, std::min(begin + kBlockNumel, numel)}))
      compare_block(difference, a.read(name, box), b.read(name, box), tolerance);
  return difference;
}

}  // namespace

SavedTensors find_tensors(const fs::path& path) {
  if (is_checkpoint(path)) return with_every_slice(read_manifest(path).saved);
  // Refuses rank files without a manifest. They are readable as full files, but a missing rank would go unnoticed.
  require<CheckpointError>(!has_rank_files(path), path.string(), ": has the files of a checkpoint's ranks, but no ",
                           kManifestName, ": it is not a whole checkpoint");
  return find_full_tensors(path);
}

void consolidate_checkpoint(const fs::path& from, const fs::path& to, bool state, const SaveFullOptions& options,
                            const Progress& progress) {
  const ReadLock hold(from);
  Manifest manifest = read_manifest(from);
  manifest.saved = with_every_slice(manifest.saved);
  std::error_code ignored;
  require(!fs::equivalent(fs::absolute(to).parent_path(), from, ignored), to.string(),
          ": is in the checkpoint that it is to be made of; expected another folder");
  SliceReader reader(manifest.saved, progress);
  std::vector<FullTensor> tensors;
  for (const auto& [name, tensor] : manifest.saved.tensors)
    if (state || tensor.kind < TensorKind::kState)
      tensors.push_back({name, tensor.dtype, tensor.shape, tensor.aliases});
  write_full(
      to, tensors, [&](const FullTensor& tensor) { return reader.read(tensor.name, whole_box(tensor.shape)); },
      options);
}

void reshard_checkpoint(const fs::path& from, const fs::path& to, int ranks, const Progress& progress) {
  std::optional<ReadLock> hold(from);
  require(ranks >= 1 && ranks <= 99999, "ranks is ", ranks, ", expected 1 to 99999");
  Manifest manifest = read_manifest(from);
  const SavedTensors saved = with_every_slice(manifest.saved);
  const auto partial = PartialCheckpoint::begin(to);
  SliceReader reader(saved, progress);
  const bool same_ranks = ranks == manifest.world_size;
  SavedTensors all{.block_bytes = saved.block_bytes, .by_rank = true, .world_size = ranks};
  for (int rank = 0; rank < ranks; ++rank) {
    const RankFileFields fields{rank, partial->id(), saved.block_bytes,
                                same_ranks ? generators_of(manifest, rank) : GeneratorStates()};
    append(all, write_rank_files(partial->path(), fields, pieces_for(saved, rank, ranks, reader)));
  }
  join_all(all);
  all.has_rng = same_ranks && (manifest.saved.has_rng || !manifest.rng.empty());
  manifest.rng.clear();
  manifest.world_size = ranks;
  manifest.saved = std::move(all);
  partial->commit(std::move(manifest));
  hold.reset();  // if `to` replaced `from`, the destructor of `partial` may now remove the old checkpoint
}

std::vector<std::string> verify_checkpoint(const fs::path& directory, const Progress& progress) {
  const ReadLock hold(directory);
  Manifest manifest = read_manifest(directory);
  std::vector<std::string> problems;
  auto collect = [&](const std::function<void()>& check) {
    try {
      check();
    } catch (const StorageUnavailable&) {
      throw;  // does not report unavailable storage as damage
    } catch (const CheckpointError& error) {
      problems.emplace_back(error.what());
    }
  };
  manifest.saved =
      with_every_slice(manifest.saved, [&](const CheckpointError& error) { problems.emplace_back(error.what()); });
  std::vector<SlicesByName> slices(manifest.saved.files.size());
  for (const auto& [name, tensor] : manifest.saved.tensors)
    for (const auto& slice : tensor.slices)
      if (!slices[slice.file].emplace(name, std::pair(&tensor, &slice)).second)
        problems.push_back("tensor '" + name + "' has two slices in " + manifest.saved.files[slice.file].name);
  std::set<std::string> names;
  for (size_t i = 0; i < slices.size(); ++i) {
    names.insert(manifest.saved.files[i].name);
    collect([&] {
      compare_header(*open_file(manifest.saved.directory / manifest.saved.files[i].name), slices[i], problems);
    });
  }
  for (const auto& name : storage_of(directory).list(manifest.saved.directory))
    if (const std::string start = (manifest.saved.directory / name).string() + ": ";
        name.ends_with(".safetensors") && !names.contains(name) &&
        std::ranges::none_of(problems, [&](const auto& known) { return known.starts_with(start); }))
      problems.push_back(start + "is not in the manifest");
  // Reads each slice separately, so that an error in one slice does not hide errors in other slices.
  SliceReader reader(manifest.saved, progress);
  for (size_t i = 0; i < slices.size(); ++i) {
    collect([&] { reader.open(static_cast<int>(i)); });
    for (const auto& [name, slice] : slices[i])
      collect([&, &tensor_name = name, &box = slice.second->box] { static_cast<void>(reader.read(tensor_name, box)); });
  }
  return problems;
}

std::vector<TensorDifference> diff_checkpoints(const fs::path& a, const fs::path& b, const DiffOptions& options,
                                               const Progress& progress) {
  require(options.tolerance >= 0, "tolerance is ", options.tolerance, ", expected 0 or more");
  const ReadLock hold_a(a), hold_b(b);
  SavedTensors first = find_tensors(a), second = find_tensors(b);
  if (options.only_parameters) {
    // Skips a tensor if either side lists it as a non-parameter, because full files list buffers as parameters.
    std::set<std::string> others;
    for (const auto* saved : {&first, &second})
      for (const auto& [name, tensor] : saved->tensors)
        if (tensor.kind != TensorKind::kParameter) others.insert(name);
    auto is_other = [&](const auto& entry) { return others.contains(entry.first); };
    std::erase_if(first.tensors, is_other);
    std::erase_if(second.tensors, is_other);
  }
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
      auto difference = compare(name, tensor.shape, first_reader, second_reader, options.tolerance);
      if (difference.different_numel > 0) differences.push_back(std::move(difference));
    }
  }
  for (const auto& [name, tensor] : second.tensors)
    if (!first.tensors.contains(name)) add(name, "only in " + b.string());
  if (is_checkpoint(a) && is_checkpoint(b) && !options.only_parameters) {
    const Manifest one = read_manifest(a), two = read_manifest(b);
    if (optimizers_to_json(one.optimizers) != optimizers_to_json(two.optimizers))
      add("(optimizer)", "kind, groups, options or steps");
    if (one.beside != two.beside) add("(beside)", "values of what is beside the model");
    if (one.extra != two.extra) add("(extra)", one.extra.dump() + " and " + two.extra.dump());
  }
  return differences;
}

}  // namespace tessera::internal
