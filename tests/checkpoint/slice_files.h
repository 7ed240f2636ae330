#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/format/shard_writer.h"

namespace tessera::testing_support {
using namespace internal;

// Writes slices of tensors to a safetensors file with the metadata of torch.distributed.checkpoint. Returns the header.
// Sets `entries` to the positions of the slices.
inline std::string write_slices(const std::filesystem::path& path, const std::vector<Piece>& pieces,
                                std::vector<SafetensorsEntry>& entries) {
  nlohmann::json offsets;
  std::string data;
  for (const Piece& piece : pieces) {
    const at::Tensor elements = piece.data().contiguous();
    entries.push_back({piece.name, piece.dtype, piece.box.sizes});
    offsets[piece.name] = {{"saved_offsets", piece.box.offsets}};
    data.append(static_cast<const char*>(elements.const_data_ptr()), elements.nbytes());
  }
  std::string header = format_safetensors_header(
      entries, {{"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", offsets.dump()}});
  std::ofstream(path, std::ios::binary) << header << data;
  return header;
}

}  // namespace tessera::testing_support
