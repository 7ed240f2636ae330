#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>

#include "tessera/checkpoint/checked_json.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/full_file.h"
#include "tessera/checkpoint/load_plan.h"
#include "tessera/checkpoint/outcome.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/comm/agreement.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kIndexSuffix[] = ".safetensors.index.json";

bool is_index(const fs::path& path) { return path.filename().string().ends_with(kIndexSuffix); }

// Where PyTorch's distributed writer says that a file's tensors belong: {"<name>": {"saved_offsets": [...]}}.
json sharding_info(const SafetensorsHeader& header, const std::string& where) {
  const auto found = header.metadata.find("DCP_SHARDING_INFO");
  if (found == header.metadata.end()) return nullptr;
  return parse_json(found->second, where + ": DCP_SHARDING_INFO");
}

std::vector<int64_t> offsets_of(const SafetensorsEntry& entry, const json& sharding, const std::string& where) {
  if (sharding.is_null()) return std::vector<int64_t>(entry.shape.size(), 0);
  if (!sharding.is_object() || !sharding.contains(entry.name))
    throw CheckpointError(where + ": DCP_SHARDING_INFO does not know the tensor '" + entry.name + "'");
  const JsonObject fields(sharding.at(entry.name), where + ": DCP_SHARDING_INFO of '" + entry.name + "'",
                          {"saved_offsets"});
  auto offsets = fields.numbers("saved_offsets");
  if (offsets.size() != entry.shape.size())
    fields.refuse("'saved_offsets' has another number of dimensions than the tensor");
  return offsets;
}

// Adds what a file holds. A tensor is as large as its slices reach.
void add_file(const fs::path& path, SavedTensors& saved) {
  const File file = open_file(path);
  const std::string where = path.string();
  const SafetensorsHeader header = read_safetensors_header(file);
  const int index = static_cast<int>(saved.files.size());
  saved.files.push_back({path.filename().string(), file.bytes(), header.header_bytes, 0});
  const json sharding = sharding_info(header, where);
  for (const auto& entry : header.entries) {
    SavedSlice slice{index, entry.begin, {offsets_of(entry, sharding, where), entry.shape}, {}};
    auto [found, added] = saved.tensors.try_emplace(entry.name);
    SavedTensor& tensor = found->second;
    if (added) {
      tensor.dtype = entry.dtype;
      tensor.shape.assign(entry.shape.size(), 0);
    } else if (sharding.is_null()) {
      throw CheckpointError(where + ": the tensor '" + entry.name + "' is in " +
                            saved.files[tensor.slices[0].file].name + " too");
    }
    if (tensor.dtype != entry.dtype || tensor.shape.size() != entry.shape.size())
      throw CheckpointError(where + ": the tensor '" + entry.name +
                            "' has another dtype or number of dimensions than in " +
                            saved.files[tensor.slices[0].file].name);
    for (size_t d = 0; d < entry.shape.size(); ++d)
      tensor.shape[d] = std::max(tensor.shape[d], slice.box.offsets[d] + entry.shape[d]);
    tensor.slices.push_back(std::move(slice));
  }
  // {"<alias>": "<name>"}, as safetensors.torch.save_model notes what it left out.
  for (const auto& [alias, name] : header.metadata)
    if (saved.tensors.contains(name) && !saved.tensors.contains(alias) && alias != "format")
      saved.tensors[name].aliases.push_back(alias);
}

// The names of an index's files; each a plain name beside it.
std::set<std::string> files_of_index(const fs::path& path) {
  const json index = parse_json(read_text(path, int64_t{1} << 30), path.string());
  const JsonObject fields(index, path.string(), {"weight_map"}, {"metadata"});
  std::set<std::string> names;
  for (const auto& [tensor, file] : fields.object("weight_map").items()) {
    if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos ||
        file.get<std::string>().starts_with("."))
      fields.refuse("the file of '" + tensor + "' is not a name beside the index");
    names.insert(file.get<std::string>());
  }
  return names;
}

}  // namespace

SavedTensors find_full_tensors(const fs::path& path) {
  std::error_code ignored;
  const bool directory = fs::is_directory(path, ignored);
  SavedTensors saved{.directory = directory ? path : path.parent_path()};
  if (saved.directory.empty()) saved.directory = ".";
  std::set<std::string> names;
  if (is_index(path)) {
    names = files_of_index(path);
  } else if (!directory) {
    names.insert(path.filename().string());
  } else {
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.path().extension() == ".safetensors" && entry.path().filename().string()[0] != '.')
        names.insert(entry.path().filename().string());
    if (names.empty()) throw CheckpointError(path.string() + ": holds no safetensors file");
  }
  for (const auto& name : names) add_file(saved.directory / name, saved);
  // Replicated tensors that several ranks wrote alike: one is enough.
  for (auto& [name, tensor] : saved.tensors) {
    std::vector<SavedSlice> once;
    for (auto& slice : tensor.slices)
      if (std::none_of(once.begin(), once.end(), [&](const SavedSlice& other) { return other.box == slice.box; }))
        once.push_back(std::move(slice));
    tensor.slices = std::move(once);
  }
  check_saved_tensors(saved, path.string());
  return saved;
}

void load_full(const fs::path& path, ModelShards& model, const LoadOptions& options) {
  const std::string what = "loading " + path.string();
  Communicator& comm = *model.comm();
  require_agreement(comm, "which file to load", {"path " + path.string()});
  LoadedState loaded;
  settle(comm, attempt([&] {
           const at::NoGradGuard no_grad;
           Manifest manifest;
           manifest.saved = find_full_tensors(path);
           loaded = read_state_of(manifest, model, model.named_shards(), nullptr, options);
           return std::string();
         }),
         what);
  const at::NoGradGuard no_grad;
  loaded.apply();
  if (options.bytes_read != nullptr) *options.bytes_read = loaded.bytes_read;
}

}  // namespace tessera
