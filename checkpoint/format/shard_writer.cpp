#include "checkpoint/format/shard_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include <tessera/errors.h>
#include "core/runtime/lazy_values.h"
#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

constexpr int64_t kWriteBytes = int64_t{8} << 20;  // approximate size of one write

// Writes a slice, several whole blocks at a time. Returns the blocks' checksums. Takes them from piece.checksums if
// these are of blocks of `block_bytes`, and otherwise computes them.
std::vector<uint64_t> write_slice(OutputFile& file, const Piece& piece, int64_t block_bytes, const Progress& progress) {
  const at::Tensor data = checked_data(piece);
  const char* from = static_cast<const char*>(data.const_data_ptr());
  const auto bytes = static_cast<int64_t>(data.nbytes());
  const int64_t step = std::max<int64_t>(1, kWriteBytes / block_bytes) * block_bytes;
  const bool are_known = piece.checksums.block_bytes == block_bytes;
  std::vector<uint64_t> sums = are_known ? piece.checksums.sums : std::vector<uint64_t>();
  for (int64_t begin = 0; begin < bytes; begin += step) {
    const int64_t end = std::min(begin + step, bytes);
    for (int64_t block = begin; block < end && !are_known; block += block_bytes)
      sums.push_back(checksum(from + block, std::min(block_bytes, end - block)));
    file.append(from + begin, end - begin);
    if (progress) progress(end - begin);
  }
  return sums;
}

// Writes the pieces to one rank file. Adds the metadata that PyTorch's HuggingFaceStorageReader expects.
void write_rank_file(const std::filesystem::path& path, const RankFileFields& fields,
                     const std::vector<const Piece*>& pieces, bool with_rng, const Progress& progress) {
  std::vector<SafetensorsEntry> entries;
  nlohmann::json offsets = nlohmann::json::object();
  int64_t digits = 0;
  for (const Piece* piece : pieces) {
    entries.push_back({piece->name, piece->dtype, piece->box.sizes});
    offsets[piece->name] = {{"saved_offsets", piece->box.offsets}};
    digits += 16 * (bytes_of(*piece) / fields.block_bytes + 1);
  }
  require(digits <= kMaxHeaderBytes, "block_bytes is ", fields.block_bytes, ": the checksums of ",
          path.filename().string(), " would have ", digits, " bytes, more than the ", kMaxHeaderBytes,
          " that a header may have; take larger blocks");
  const std::map<std::string, std::string> metadata = {
      {"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", offsets.dump()}};
  std::map<std::string, std::vector<uint64_t>> checksums;
  // A placeholder with the length of the final header. The checksums are known only after the data was written.
  const std::string room = format_rank_header(entries, metadata, fields, checksums, with_rng);
  const auto start_bytes = static_cast<int64_t>(room.size());
  const int64_t bytes = entries.empty() ? start_bytes : entries.back().begin + entries.back().bytes;
  const auto file = storage_of(path).create(path, start_bytes, bytes);
  for (const Piece* piece : pieces) checksums[piece->name] = write_slice(*file, *piece, fields.block_bytes, progress);
  const std::string header = format_rank_header(entries, metadata, fields, checksums, with_rng);
  if (header.size() != room.size()) throw std::logic_error(path.string() + ": its header has changed its length");
  file->finish(header);
}

// Assigns the largest piece of each tensor to the first file, the second largest piece to the second file, and so on.
std::vector<std::vector<const Piece*>> spread_over_files(const std::vector<Piece>& pieces) {
  std::map<std::string, std::vector<const Piece*>> by_name;
  for (const Piece& piece : pieces) by_name[piece.name].push_back(&piece);
  std::vector<std::vector<const Piece*>> files;
  for (auto& [name, own] : by_name) {
    std::ranges::stable_sort(own, [](const Piece* a, const Piece* b) { return a->box.numel() > b->box.numel(); });
    files.resize(std::max(files.size(), own.size()));
    for (size_t k = 0; k < own.size(); ++k) files[k].push_back(own[k]);
  }
  for (auto& file : files) std::ranges::sort(file);
  return files;
}

}  // namespace

int64_t bytes_of(const Piece& piece) { return tensor_bytes(piece.box.sizes, piece.dtype).value(); }

bool can_be_data(const Piece& piece, const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !has_lazy_values(tensor) && tensor.scalar_type() == piece.dtype &&
         tensor.sizes() == at::IntArrayRef(piece.box.sizes);
}

at::Tensor checked_data(const Piece& piece) {
  const at::Tensor data = piece.data();
  require(can_be_data(piece, data), "the data for the slice ", to_string(piece.box), " of '", piece.name, "' is ",
          data.toString(), " ", data.sizes(), ", expected ", c10::toString(piece.dtype), " ",
          at::IntArrayRef(piece.box.sizes), ", contiguous and in host memory");
  return data;
}

SavedTensors write_rank_files(const std::filesystem::path& directory, const RankFileFields& fields,
                              const std::vector<Piece>& pieces, const Progress& progress) {
  auto files = spread_over_files(pieces);
  if (files.empty() && !fields.rng.empty()) files.emplace_back();
  for (size_t k = 0; k < files.size(); ++k)
    write_rank_file(directory / rank_file_name(fields.rank, k), fields, files[k], k == 0, progress);
  SavedTensors saved{.directory = directory, .block_bytes = fields.block_bytes, .by_rank = true, .id = fields.id};
  for (const Piece& piece : pieces) {
    auto [found, added] = saved.tensors.try_emplace(piece.name);
    SavedTensor& tensor = found->second;
    if (added) {
      tensor = {piece.dtype, piece.shape, piece.aliases, piece.kind, {}, piece.order, {}};
      tensor.runs.push_back({fields.rank, 0, 1, piece.memory.begin, piece.memory.numel()});
    } else {
      tensor.runs[0].numel += piece.memory.numel();
    }
  }
  return saved;
}

void append(SavedTensors& all, SavedTensors part) {
  all.block_bytes = part.block_bytes;
  all.by_rank = part.by_rank;
  for (auto& [name, tensor] : part.tensors) {
    const auto [found, added] = all.tensors.try_emplace(name, tensor);
    if (added) continue;
    SavedTensor& target = found->second;
    if (target.dtype != tensor.dtype || target.shape != tensor.shape || target.kind != tensor.kind ||
        target.aliases != tensor.aliases || target.order != tensor.order)
      throw CheckpointError("ranks differ in the shape, dtype, order or names of '" + name +
                            "': " + to_string(target.shape) + " and " + to_string(tensor.shape));
    target.runs.insert(target.runs.end(), tensor.runs.begin(), tensor.runs.end());
  }
}

void join_all(SavedTensors& saved) {
  for (auto& [name, tensor] : saved.tensors) join_runs(tensor.runs);
}

}  // namespace tessera::internal
