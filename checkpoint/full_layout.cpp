#include "tessera/checkpoint/full_layout.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "tessera/checkpoint/dtype.h"
#include "tessera/checkpoint/entries.h"

namespace tessera {
namespace {

// Tensors in their order, a new group where the next would exceed the limit.
std::vector<std::vector<const FullTensor*>> group_by_bytes(const std::vector<FullTensor>& tensors, int64_t max_bytes) {
  std::vector<std::vector<const FullTensor*>> groups(1);
  int64_t bytes = 0;
  for (const FullTensor& tensor : tensors) {
    if (!safetensors_name(tensor.dtype))
      throw std::invalid_argument("'" + tensor.name + "' has the dtype " + c10::toString(tensor.dtype) +
                                  ", which safetensors files have no name for");
    const int64_t own = tensor_bytes(tensor.shape, tensor.dtype).value();
    if (max_bytes > 0 && bytes + own > max_bytes && !groups.back().empty()) {
      groups.emplace_back();
      bytes = 0;
    }
    groups.back().push_back(&tensor);
    bytes += own;
  }
  return groups;
}

}  // namespace

FullLayout plan_full_files(const std::filesystem::path& file, const std::vector<FullTensor>& tensors,
                           const SaveFullOptions& options) {
  if (options.max_file_bytes < 0)
    throw std::invalid_argument("max_file_bytes is " + std::to_string(options.max_file_bytes) + ", expected 0 or more");
  const auto groups = group_by_bytes(tensors, options.max_file_bytes);
  FullLayout layout;
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total_bytes = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    FullFile& full = layout.files.emplace_back();
    full.path = file;
    if (groups.size() > 1)
      full.path.replace_filename(file.stem().string() + "-" + five_digits(i + 1) + "-of-" + five_digits(groups.size()) +
                                 file.extension().string());
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    for (const FullTensor* tensor : groups[i]) {
      full.entries.push_back({tensor->name, tensor->dtype, tensor->shape});
      for (const auto& alias : tensor->aliases) metadata[alias] = tensor->name;
      weight_map[tensor->name] = full.path.filename().string();
    }
    full.header = format_safetensors_header(full.entries, metadata);
    full.bytes = static_cast<int64_t>(full.header.size());
    for (const auto& entry : full.entries) full.bytes += entry.bytes, total_bytes += entry.bytes;
  }
  if (groups.size() > 1) {
    layout.index_path = file.string() + ".index.json";
    layout.index =
        nlohmann::json{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}}.dump(2) + "\n";
  }
  return layout;
}

std::filesystem::path draft_of(const std::filesystem::path& path) {
  std::filesystem::path draft = path;
  return draft.replace_filename(std::string(".").append(path.filename().string()) + ".draft");
}

void publish(const FullLayout& layout) {
  if (!layout.index.empty()) {
    std::error_code ignored;
    std::filesystem::remove(draft_of(layout.index_path), ignored);
    write_text(draft_of(layout.index_path), layout.index);
  }
  for (const auto& file : layout.files) rename_entry(draft_of(file.path), file.path, true);
  if (!layout.index.empty()) rename_entry(draft_of(layout.index_path), layout.index_path, true);
  const auto folder = std::filesystem::absolute(layout.files.front().path).parent_path();
  sync_directory(folder);
}

void discard(const FullLayout& layout) {
  std::error_code ignored;
  for (const auto& file : layout.files) std::filesystem::remove(draft_of(file.path), ignored);
  if (!layout.index.empty()) std::filesystem::remove(draft_of(layout.index_path), ignored);
}

}  // namespace tessera
