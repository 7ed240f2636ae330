#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include <tessera/checkpoint/full_file.h>
#include <tessera/errors.h>
#include <tessera/host_results.h>
#include "checkpoint/format/checked_json.h"
#include "checkpoint/format/entries.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/load_state.h"
#include "checkpoint/save/outcome.h"

namespace tessera {
using namespace internal;
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Returns an entry's offsets in `sharding`, {"<name>": {"saved_offsets": [...]}}, or zeros if `sharding` is null.
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

// Returns the target of a symbolic link, or any other path unchanged. Model hubs store links in their caches.
fs::path followed(const fs::path& path) {
  std::error_code error;
  if (is_remote(path) || !fs::is_symlink(path, error)) return path;
  const fs::path target = fs::canonical(path, error);
  if (error) throw CheckpointError(path.string() + ": is a symbolic link to what is not there: " + error.message());
  return target;
}

// Adds a file and its tensors to `saved`. Skips tensors that `belongs` rejects. Infers shapes from the slices' extents.
void add_file(const fs::path& path, SavedTensors& saved, const std::function<bool(const std::string&)>& belongs) {
  const auto file = open_file(followed(path));
  const bool is_link = file->path() != path;
  const std::string where = path.string();
  const SafetensorsHeader header = read_safetensors_header(*file);
  const int index = static_cast<int>(saved.files.size());
  saved.files.push_back(
      {is_link ? file->path().string() : path.filename().string(), file->bytes(), header.header_bytes, 0});
  json sharding;
  if (const auto found = header.metadata.find("DCP_SHARDING_INFO"); found != header.metadata.end())
    sharding = parse_json(found->second, where + ": DCP_SHARDING_INFO");
  for (const auto& entry : header.entries) {
    if (!belongs(entry.name)) continue;
    const Box box{offsets_of(entry, sharding, where), entry.shape};
    auto [found, added] = saved.tensors.try_emplace(entry.name);
    SavedTensor& tensor = found->second;
    if (added) {
      tensor.dtype = entry.dtype;
      tensor.shape.assign(entry.shape.size(), 0);
    } else if (const std::string& other = saved.files[tensor.slices[0].file].name; sharding.is_null()) {
      throw CheckpointError(where + ": the tensor '" + entry.name + "' is in " + other + " too");
    } else if (tensor.dtype != entry.dtype || tensor.shape.size() != entry.shape.size()) {
      throw CheckpointError(where + ": the tensor '" + entry.name +
                            "' has another dtype or number of dimensions than in " + other);
    }
    for (size_t d = 0; d < entry.shape.size(); ++d)
      tensor.shape[d] = std::max(tensor.shape[d], box.offsets[d] + entry.shape[d]);
    // Skips a slice with a known box, because several ranks may have written copies of a replicated tensor.
    if (std::ranges::none_of(tensor.slices, [&](const auto& slice) { return slice.box == box; }))
      tensor.slices.push_back({index, entry.begin, box, {}});
  }
  // safetensors.torch.save_model() writes a tied tensor once, and lists its other names as {"<alias>": "<name>"}.
  for (const auto& [alias, name] : header.metadata)
    if (saved.tensors.contains(name) && !saved.tensors.contains(alias) && alias != "format")
      saved.tensors[name].aliases.push_back(alias);
}

// Reads an index, which maps tensor names to file names. Throws CheckpointError for a file outside the index's folder.
std::map<std::string, std::string> read_index(const fs::path& path) {
  const json index = parse_json(read_text(followed(path), int64_t{1} << 30), path.string());
  const JsonObject fields(index, path.string(), {"weight_map"}, {"metadata"});
  std::map<std::string, std::string> places;
  for (const auto& [tensor, file] : fields.object("weight_map").items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "/";
    if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos || name.starts_with("."))
      fields.refuse("the file of '" + tensor + "' is not a name beside the index");
    places[tensor] = name;
  }
  return places;
}

// Returns whether the path names an index, such as the "model.safetensors.index.json" that save_full() writes.
bool is_index(const fs::path& path) { return path.filename().string().ends_with(".index.json"); }

// Returns the path of the directory's safetensors index, or "" if there is none. If there are several indices, chooses
// model.safetensors.index.json. Throws CheckpointError if none of them has that name.
fs::path index_of(const fs::path& directory) {
  std::vector<fs::path> found;
  for (const auto& name : storage_of(directory).list(directory))
    if (name.ends_with(".safetensors.index.json") && name[0] != '.') found.push_back(directory / name);
  if (found.size() < 2) return found.empty() ? fs::path() : found[0];
  const fs::path usual = directory / "model.safetensors.index.json";
  if (std::ranges::find(found, usual) != found.end()) return usual;
  throw CheckpointError(directory.string() + ": holds " + std::to_string(found.size()) +
                        " indices; give the path of the one that is meant");
}

// If `path` is a model hub's cache ("models--gpt2"), returns the snapshot in refs/main, or the only one; else `path`.
fs::path snapshot_of(const fs::path& path) {
  const fs::path snapshots = path / "snapshots";
  std::error_code ignored;
  if (is_remote(path) || !fs::is_directory(snapshots, ignored) || !fs::is_directory(path / "refs", ignored))
    return path;
  std::string name = first_line(path / "refs/main");
  const auto names = storage_of(path).list(snapshots);
  if (name.empty() && names.size() == 1) name = names[0].substr(0, names[0].find('/'));
  if (name.empty() || name.find('/') != std::string::npos || !fs::is_directory(snapshots / name, ignored))
    throw CheckpointError(path.string() + ": is a hub's cache with " + std::to_string(names.size()) +
                          " snapshots, and refs/main names none of them; give the path of one");
  return snapshots / name;
}

SavedTensors find_indexed(const fs::path& index, SavedTensors saved) {
  const auto places = read_index(index);
  std::set<std::string> names;
  for (const auto& [tensor, file] : places) names.insert(file);
  for (const auto& name : names)
    add_file(saved.directory / name, saved, [&](const std::string& tensor) {
      const auto place = places.find(tensor);
      return place == places.end() || place->second == name;
    });
  for (const auto& [tensor, file] : places)
    if (!saved.tensors.contains(tensor))
      throw CheckpointError(index.string() + ": says that '" + tensor + "' is in " + file + ", which does not have it");
  return saved;
}

}  // namespace

SavedTensors internal::find_full_tensors(const fs::path& given) {
  const fs::path path = snapshot_of(given);
  std::error_code ignored;
  const bool directory =
      is_remote(path) ? !is_index(path) && path.extension() != ".safetensors" : fs::is_directory(path, ignored);
  SavedTensors saved{.directory = directory ? path : path.parent_path()};
  if (saved.directory.empty()) saved.directory = ".";
  fs::path index = directory ? index_of(path) : is_index(path) ? path : fs::path();
  // Prefers an index beside the path. If save_full() wrote an index, a file at `path` can only be from an older save.
  if (const fs::path beside = path.string() + ".index.json";
      !directory && index.empty() && storage_of(path).exists(beside))
    index = beside;
  auto all = [](const std::string&) { return true; };
  if (!index.empty()) {
    saved = find_indexed(index, std::move(saved));
  } else if (!directory) {
    add_file(saved.directory / path.filename(), saved, all);
  } else {
    std::set<fs::path> files;  // sorted by name
    for (const auto& name : storage_of(path).list(path))
      if (name.ends_with(".safetensors") && name[0] != '.') files.insert(path / name);
    if (files.empty())
      throw CheckpointError(path.string() + ": holds no safetensors file" + inner_folder_of_checkpoints(path));
    for (const auto& file : files) add_file(file, saved, all);
  }
  check_saved_tensors(saved, path.string());
  return saved;
}

void load_full(const fs::path& path, ModelShards& model, const LoadOptions& options) {
  const std::string what = "loading " + path.string();
  Communicator& comm = *model.comm();
  comm.require_values(what);
  require_agreement(comm, "which file to load", describe_load(path, options));
  Manifest manifest;
  on_all_ranks(comm, what, [&] { manifest.saved = find_full_tensors(path); });
  load_state(manifest, {model}, options, what);
}

std::vector<FullTensor> list_full(const fs::path& path) {
  std::vector<FullTensor> tensors;
  for (const auto& [name, tensor] : find_full_tensors(path).tensors)
    tensors.push_back({name, tensor.dtype, tensor.shape, tensor.aliases});
  return tensors;
}

at::Tensor read_full(const fs::path& path, const std::string& name) {
  const SavedTensors saved = find_full_tensors(path);
  for (const auto& [own, tensor] : saved.tensors)
    if (own == name || std::ranges::find(tensor.aliases, name) != tensor.aliases.end())
      return SliceReader(saved).read(own, whole_box(tensor.shape));
  throw CheckpointError(path.string() + ": has no tensor '" + name + "'");
}

}  // namespace tessera
