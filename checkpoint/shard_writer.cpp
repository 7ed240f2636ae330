#include "tessera/checkpoint/shard_writer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"

namespace tessera {
namespace {

constexpr int64_t kWriteBytes = int64_t{8} << 20;

// Bytes to a file in order, in few large writes, each handed to the disk at once: while it works on
// one, the next is copied and its checksum taken.
class Stream {
 public:
  explicit Stream(const File& file) : file_(file), buffer_(new char[kWriteBytes]) {}

  void append(const void* data, int64_t bytes) {
    if (buffered_ + bytes > kWriteBytes) flush();
    if (bytes >= kWriteBytes) return write(data, bytes);
    if (bytes > 0) std::memcpy(buffer_.get() + buffered_, data, static_cast<size_t>(bytes));
    buffered_ += bytes;
  }

  void flush() {
    write(buffer_.get(), buffered_);
    buffered_ = 0;
  }

 private:
  void write(const void* data, int64_t bytes) {
    if (bytes == 0) return;
    file_.write(data, bytes, position_);
    file_.start_writing_out(position_, bytes);
    position_ += bytes;
  }

  const File& file_;
  std::unique_ptr<char[]> buffer_;
  int64_t buffered_ = 0;
  int64_t position_ = 0;
};

void check_data(const at::Tensor& data, const Piece& piece) {
  if (!data.is_cpu() || !data.is_contiguous() || data.scalar_type() != piece.dtype || data.numel() != piece.box.numel())
    throw std::logic_error("the data for the slice " + to_string(piece.box) + " of '" + piece.name +
                           "' is not what was announced");
}

// Writes a slice in steps of whole blocks, and returns their checksums.
std::vector<uint64_t> write_slice(Stream& stream, const at::Tensor& data, int64_t block_bytes,
                                  const Progress& progress) {
  const char* from = static_cast<const char*>(data.const_data_ptr());
  const auto bytes = static_cast<int64_t>(data.nbytes());
  const int64_t step = block_bytes == 0 ? kWriteBytes : std::max<int64_t>(1, kWriteBytes / block_bytes) * block_bytes;
  std::vector<uint64_t> sums;
  for (int64_t begin = 0; begin < bytes; begin += step) {
    const int64_t end = std::min(begin + step, bytes);
    for (int64_t block = begin; block_bytes > 0 && block < end; block += block_bytes)
      sums.push_back(checksum(from + block, std::min(block_bytes, end - block)));
    stream.append(from + begin, end - begin);
    if (progress) progress(end - begin);
  }
  return sums;
}

}  // namespace

SavedTensors write_safetensors(const std::filesystem::path& path, const std::vector<Piece>& pieces,
                               const std::map<std::string, std::string>& metadata, int64_t block_bytes,
                               const Progress& progress) {
  std::vector<SafetensorsEntry> entries;
  for (const Piece& piece : pieces) entries.push_back({piece.name, piece.dtype, piece.box.sizes});
  const std::string header = format_safetensors_header(entries, metadata);

  SavedTensors saved{.directory = path.parent_path(), .block_bytes = block_bytes};
  const File file = create_file(path);
  Stream stream(file);
  stream.append(header.data(), static_cast<int64_t>(header.size()));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const at::Tensor data = piece.data();
    check_data(data, piece);
    SavedTensor& tensor = saved.tensors[piece.name];
    tensor = {piece.dtype, piece.shape, piece.aliases, piece.kind, {}};
    tensor.slices.push_back({0, entries[i].begin, piece.box, write_slice(stream, data, block_bytes, progress)});
  }
  stream.flush();
  file.sync();
  saved.files.push_back(
      {path.filename().string(), file.bytes(), static_cast<int64_t>(header.size()), checksum(header)});
  return saved;
}

SavedTensors write_pieces(const std::filesystem::path& directory, const std::string& stem,
                          const std::vector<Piece>& pieces, int64_t block_bytes, const Progress& progress) {
  // The largest piece of each name to the first file, the next to the second, ...
  std::map<std::string, std::vector<size_t>> by_name;
  for (size_t i = 0; i < pieces.size(); ++i) by_name[pieces[i].name].push_back(i);
  std::vector<std::vector<size_t>> files;
  for (auto& [name, indices] : by_name) {
    std::stable_sort(indices.begin(), indices.end(),
                     [&](size_t a, size_t b) { return pieces[a].box.numel() > pieces[b].box.numel(); });
    if (files.size() < indices.size()) files.resize(indices.size());
    for (size_t k = 0; k < indices.size(); ++k) files[k].push_back(indices[k]);
  }
  SavedTensors saved{.directory = directory, .block_bytes = block_bytes};
  for (size_t k = 0; k < files.size(); ++k) {
    std::sort(files[k].begin(), files[k].end());
    std::vector<Piece> own;
    nlohmann::json offsets = nlohmann::json::object();
    for (const size_t index : files[k]) {
      own.push_back(pieces[index]);
      offsets[own.back().name] = {{"saved_offsets", own.back().box.offsets}};
    }
    append(saved, write_safetensors(directory / (stem + "-" + std::to_string(k) + ".safetensors"), own,
                                    {{"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", offsets.dump()}},
                                    block_bytes, progress));
  }
  return saved;
}

void append(SavedTensors& all, SavedTensors part) {
  const int first_file = static_cast<int>(all.files.size());
  all.block_bytes = part.block_bytes;
  all.files.insert(all.files.end(), part.files.begin(), part.files.end());
  for (auto& [name, tensor] : part.tensors) {
    auto [found, added] = all.tensors.try_emplace(name, tensor);
    SavedTensor& target = found->second;
    if (added) {
      target.slices.clear();
    } else if (target.dtype != tensor.dtype || target.shape != tensor.shape || target.kind != tensor.kind ||
               target.aliases != tensor.aliases) {
      throw CheckpointError("ranks differ in the shape, dtype or names of '" + name + "': " + to_string(target.shape) +
                            " and " + to_string(tensor.shape));
    }
    for (auto& slice : tensor.slices) {
      slice.file += first_file;
      target.slices.push_back(std::move(slice));
    }
  }
}

}  // namespace tessera
