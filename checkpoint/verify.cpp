#include "tessera/checkpoint/verify.h"

#include <functional>
#include <map>
#include <set>
#include <utility>

#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/checkpoint/slice_reader.h"

namespace tessera {
namespace {

using SlicesByName = std::map<std::string, std::pair<const SavedTensor*, const SavedSlice*>>;

// What the file's own header says against what the manifest says of it.
void compare_header(const File& file, const SlicesByName& slices, std::vector<std::string>& problems) {
  const std::string where = file.path().string();
  std::set<std::string> seen;
  for (const auto& entry : read_safetensors_header(file).entries) {
    seen.insert(entry.name);
    const auto found = slices.find(entry.name);
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

}  // namespace

std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, const Progress& progress) {
  const Manifest manifest = read_manifest(directory);
  std::vector<std::string> problems;
  auto collect = [&](const std::function<void()>& check) {
    try {
      check();
    } catch (const CheckpointError& error) {
      problems.emplace_back(error.what());
    }
  };
  std::vector<SlicesByName> slices(manifest.saved.files.size());
  for (const auto& [name, tensor] : manifest.saved.tensors)
    for (const auto& slice : tensor.slices)
      if (!slices[slice.file].emplace(name, std::pair(&tensor, &slice)).second)
        problems.push_back("tensor '" + name + "' has two slices in " + manifest.saved.files[slice.file].name);
  std::set<std::string> listed;
  for (size_t i = 0; i < slices.size(); ++i) {
    listed.insert(manifest.saved.files[i].name);
    collect([&] { compare_header(open_file(directory / manifest.saved.files[i].name), slices[i], problems); });
  }
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (entry.path().extension() == ".safetensors" && !listed.contains(entry.path().filename()))
      problems.push_back(entry.path().string() + ": is not in the manifest");
  // File by file, slice by slice, so that one that is damaged does not hide the next.
  SliceReader reader(manifest.saved, progress);
  for (size_t i = 0; i < slices.size(); ++i) {
    collect([&] { reader.open(static_cast<int>(i)); });
    for (const auto& [name, slice] : slices[i])
      collect([&, &tensor_name = name, &box = slice.second->box] { static_cast<void>(reader.read(tensor_name, box)); });
  }
  return problems;
}

}  // namespace tessera
