#include "checkpoint/format/rank_files.h"

#include <algorithm>
#include <utility>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/entries.h"

namespace tessera::internal {
namespace {

using nlohmann::json;

constexpr char kNote[] = "TESSERA";
constexpr char kSeal[] = "\"TESSERA_CHECKSUM\":\"";
constexpr char kUnsealed[] = "0000000000000000";
constexpr size_t kSealDigits = 16;
constexpr int64_t kMaxRank = 10'000'000;

int64_t blocks_of(int64_t bytes, int64_t block_bytes) { return (bytes + block_bytes - 1) / block_bytes; }

// Returns the position of the header's own checksum in the header, or npos if there is none.
size_t seal_position(const std::string& header) {
  const size_t found = header.find(kSeal);
  if (found == std::string::npos || found + sizeof kSeal - 1 + kSealDigits > header.size()) return std::string::npos;
  return found + sizeof kSeal - 1;
}

// Returns the header's checksum, computed with zeros in the place of the stored checksum's digits at `position`.
std::string seal_of(std::string header, size_t position) {
  header.replace(position, kSealDigits, kUnsealed);
  return to_hex(checksum(header));
}

void check_seal(const std::string& header, const std::string& where) {
  const size_t position = seal_position(header);
  if (position == std::string::npos || header.substr(position, kSealDigits) != seal_of(header, position))
    throw CheckpointError(where + ": the checksum of its header does not match: the file is damaged");
}

bool follows(const RankRun& a, const RankRun& b) {
  if (a.numel != b.numel || b.begin != a.begin + a.count * a.numel) return false;
  const int64_t step = a.count > 1 ? a.rank_step : b.rank - a.rank;
  return step > 0 && b.rank == a.rank + a.count * step && (b.count == 1 || b.rank_step == step);
}

struct HeldBox {
  const std::string* name;
  Box box;
};

// Adds file `number` of a rank, and its slices with these boxes, to `all`. Reads the slices' positions from the file.
void list_file(const SavedTensors& saved, int64_t rank, size_t number, const std::vector<HeldBox>& boxes,
               SavedTensors& all) {
  const auto file = open_file(saved.directory / rank_file_name(rank, number));
  const std::string where = file->path().string();
  const RankFile rank_file = read_rank_file(*file, saved, rank);
  std::string header(static_cast<size_t>(rank_file.header_bytes), '\0');
  file->read(header.data(), rank_file.header_bytes, 0);
  std::vector<SavedSlice> slices;
  for (const auto& [name, box] : boxes)
    slices.push_back(rank_file.slice(*name, saved.tensors.at(*name), box, saved.block_bytes, where));
  for (size_t i = 0; i < boxes.size(); ++i) {
    slices[i].file = static_cast<int>(all.files.size());
    all.tensors.at(*boxes[i].name).slices.push_back(std::move(slices[i]));
  }
  all.files.push_back({rank_file_name(rank, number), file->bytes(), rank_file.header_bytes, checksum(header)});
}

}  // namespace

std::string rank_file_name(int64_t rank, size_t number) {
  return "rank-" + five_digits(rank) + "-" + std::to_string(number) + ".safetensors";
}

std::vector<int64_t> memory_strides(const SavedTensor& tensor) {
  if (tensor.order.empty()) return row_major_strides(tensor.shape);
  std::vector<int64_t> strides(tensor.shape.size());
  int64_t stride = 1;
  for (size_t i = tensor.order.size(); i-- > 0; stride *= std::max<int64_t>(1, tensor.shape[tensor.order[i]]))
    strides[tensor.order[i]] = stride;
  return strides;
}

std::vector<Box> boxes_by_file(const SavedTensor& tensor, Range held) {
  if (numel_of(tensor.shape) == 0) return {whole_box(tensor.shape)};
  std::vector<Box> boxes;
  for (auto& segment : segments_of(tensor.shape, memory_strides(tensor), held)) boxes.push_back(std::move(segment.box));
  // Sorts by descending size, because write_rank_files() writes the largest box to file 0, the next to file 1, ...
  std::ranges::stable_sort(boxes, [](const Box& a, const Box& b) { return a.numel() > b.numel(); });
  return boxes;
}

void for_each_holder(const SavedTensor& tensor, Range range, const std::function<void(int64_t, Range)>& visit) {
  const auto& runs = tensor.runs;
  if (numel_of(tensor.shape) == 0) return visit(runs.at(0).rank, {0, 0});
  auto run = std::ranges::upper_bound(runs, range.begin, {}, &RankRun::begin);
  if (run != runs.begin()) --run;
  for (; run != runs.end() && run->begin < range.end; ++run)
    for (int64_t i = std::max<int64_t>(0, (range.begin - run->begin) / run->numel); i < run->count; ++i) {
      const int64_t begin = run->begin + i * run->numel;
      if (begin >= range.end) return;
      visit(run->rank + i * run->rank_step, {begin, begin + run->numel});
    }
}

Range range_of_box(const SavedTensor& tensor, const Box& box) {
  if (box.numel() == 0) return {0, 0};
  const auto strides = memory_strides(tensor);
  Range range{0, 1};
  for (size_t d = 0; d < strides.size(); ++d) {
    range.begin += box.offsets[d] * strides[d];
    range.end += (box.offsets[d] + box.sizes[d] - 1) * strides[d];
  }
  return range;
}

void join_runs(std::vector<RankRun>& runs) {
  std::ranges::sort(
      runs, [](const RankRun& a, const RankRun& b) { return std::pair(a.begin, a.rank) < std::pair(b.begin, b.rank); });
  std::vector<RankRun> joined;
  for (const RankRun& run : runs) {
    if (!joined.empty() && run.numel == 0 && joined.back().numel == 0) continue;
    if (joined.empty() || run.numel == 0 || !follows(joined.back(), run)) {
      joined.push_back(run);
      continue;
    }
    RankRun& last = joined.back();
    if (last.count == 1) last.rank_step = run.rank - last.rank;
    last.count += run.count;
  }
  runs = std::move(joined);
}

std::string format_rank_header(std::vector<SafetensorsEntry>& entries,
                               const std::map<std::string, std::string>& metadata, const RankFileFields& own,
                               const std::map<std::string, std::vector<uint64_t>>& checksums, bool with_rng) {
  json sums = json::object();
  for (const auto& entry : entries) {
    const int64_t bytes = tensor_bytes(entry.shape, entry.dtype).value();
    const auto found = checksums.find(entry.name);
    sums[entry.name] = found == checksums.end()
                           ? std::string(static_cast<size_t>(blocks_of(bytes, own.block_bytes)) * kSealDigits, '0')
                           : checksums_to_hex(found->second);
  }
  json fields = {{"id", to_hex(own.id)}, {"rank", own.rank}, {"block_bytes", own.block_bytes}, {"checksums", sums}};
  if (with_rng && !own.rng.empty()) fields["rng"] = generators_to_json(own.rng);
  auto all = metadata;
  all[kNote] = fields.dump();
  all["TESSERA_CHECKSUM"] = kUnsealed;
  std::string header = format_safetensors_header(entries, all);
  const size_t position = seal_position(header);
  return header.replace(position, kSealDigits, seal_of(header, position));
}

RankFile read_rank_file(const InputFile& file, const SavedTensors& saved, int64_t rank) {
  const std::string where = file.path().string();
  const std::string bytes = read_header_bytes(file);
  check_seal(bytes, where);
  auto header = parse_safetensors_header(std::string_view(bytes).substr(8), file.bytes(), where);
  const auto found = header.metadata.find(kNote);
  if (found == header.metadata.end()) throw CheckpointError(where + ": is not a rank's file of a checkpoint");
  const json parsed = parse_json(found->second, where + ": " + kNote);
  const JsonObject fields(parsed, where + ": " + kNote, {"id", "rank", "block_bytes", "checksums"}, {"rng"});
  if (fields.hex("id") != saved.id) fields.refuse("it is of another checkpoint: its id is " + fields.text("id"));
  if (fields.number("rank", 0, kMaxRank) != rank)
    fields.refuse("it is of rank " + std::to_string(fields.number("rank")) + ", expected " + std::to_string(rank));
  if (fields.number("block_bytes") != saved.block_bytes) fields.refuse("'block_bytes' is not the manifest's");
  RankFile result{.header_bytes = header.header_bytes};
  const json& sums = fields.object("checksums");
  for (auto& entry : header.entries) {
    const auto text = sums.find(entry.name);
    if (text == sums.end() || !text->is_string()) fields.refuse("it has no checksums of '" + entry.name + "'");
    result.checksums[entry.name] = checksums_from_hex(text->get_ref<const std::string&>(), fields.where());
    result.entries.emplace(entry.name, std::move(entry));
  }
  if (fields.has("rng")) result.rng = generators_from_json(fields.at("rng"), where);
  return result;
}

SavedSlice RankFile::slice(const std::string& name, const SavedTensor& tensor, const Box& box, int64_t block_bytes,
                           const std::string& where) const {
  const auto found = entries.find(name);
  if (found == entries.end())
    throw CheckpointError(where + ": has no tensor '" + name + "', which the manifest says it has");
  const SafetensorsEntry& entry = found->second;
  if (entry.dtype != tensor.dtype || entry.shape != box.sizes)
    throw CheckpointError(where + ": tensor '" + name + "' is not what the manifest says: it has the shape " +
                          to_string(entry.shape) + ", expected " + to_string(box.sizes));
  const auto& sums = checksums.at(name);
  if (static_cast<int64_t>(sums.size()) != blocks_of(entry.bytes, block_bytes))
    throw CheckpointError(where + ": tensor '" + name + "' has " + std::to_string(sums.size()) +
                          " checksums; expected " + std::to_string(blocks_of(entry.bytes, block_bytes)));
  return {0, entry.begin, box, sums};
}

GeneratorStates generators_of(const Manifest& manifest, int64_t rank) {
  if (!manifest.saved.by_rank)
    return rank < static_cast<int64_t>(manifest.rng.size()) ? manifest.rng[rank] : GeneratorStates();
  if (!manifest.saved.has_rng) return {};
  const auto file = open_file(manifest.saved.directory / rank_file_name(rank, 0));
  return read_rank_file(*file, manifest.saved, rank).rng;
}

SavedTensors with_every_slice(const SavedTensors& saved, const std::function<void(const CheckpointError&)>& on_damage) {
  if (!saved.by_rank) return saved;
  SavedTensors all{.directory = saved.directory, .block_bytes = saved.block_bytes};
  std::map<std::pair<int64_t, size_t>, std::vector<HeldBox>> files;
  for (const auto& [name, tensor] : saved.tensors) {
    all.tensors[name] = {tensor.dtype, tensor.shape, tensor.aliases, tensor.kind, {}, tensor.order, {}};
    for_each_holder(tensor, {0, numel_of(tensor.shape)},
                    [&, &key = name, &held_tensor = tensor](int64_t rank, Range held) {
                      auto boxes = boxes_by_file(held_tensor, held);
                      for (size_t k = 0; k < boxes.size(); ++k) files[{rank, k}].push_back({&key, std::move(boxes[k])});
                    });
  }
  for (int64_t rank = 0; saved.has_rng && rank < saved.world_size; ++rank) files[{rank, 0}];
  for (const auto& [place, tensors] : files) try {
      list_file(saved, place.first, place.second, tensors, all);
    } catch (const StorageUnavailable&) {
      throw;
    } catch (const CheckpointError& error) {
      if (!on_damage) throw;
      on_damage(error);
    }
  return all;
}

}  // namespace tessera::internal
