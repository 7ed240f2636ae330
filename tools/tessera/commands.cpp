#include "commands.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <list>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <tessera/checkpoint.h>
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/offline.h"
#include "checkpoint/save/commit.h"
#include "plan/report/quantity_text.h"
#include "progress_bar.h"

namespace fs = std::filesystem;
using nlohmann::json;
using namespace tessera;
using namespace tessera::internal;

namespace {

// Returns the newest checkpoint if `path` is a folder of checkpoints, otherwise `path`.
fs::path resolve(const fs::path& path) {
  std::error_code ignored;
  if (is_checkpoint(path) || fs::is_regular_file(path, ignored)) return path;
  const auto latest = latest_checkpoint(path);
  if (!latest) return path;
  std::fprintf(stderr, "tessera: %s holds checkpoints; taking the newest, %s\n", path.c_str(),
               latest->filename().c_str());
  return *latest;
}

// Returns resolve(path). If it exists but is not a checkpoint, throws an error that names the commands that accept it.
fs::path checkpoint_of(const fs::path& path) {
  const fs::path found = resolve(path);
  std::error_code ignored;
  if (!is_checkpoint(found) && fs::exists(found, ignored))
    throw std::invalid_argument(found.string() + ": is no checkpoint, " +
                                (fs::is_directory(found, ignored)
                                     ? std::string("it has no ") + kManifestName + inner_folder_of_checkpoints(found)
                                     : "which is a folder") +
                                "; `tessera inspect` and `tessera diff` take full safetensors files too");
  return found;
}

// Runs `act` on checkpoints that running jobs may replace or remove. Protects each checkpoint from removal. If one was
// replaced, reads it at its new path. `choose` is resolve() or checkpoint_of().
void read_beside_jobs(const std::vector<fs::path>& given, fs::path (*choose)(const fs::path&),
                      const std::function<void(const std::vector<fs::path>&, std::list<ReadLock>&)>& act) {
  constexpr int kMostAttempts = 20;
  for (int attempt = 1;; ++attempt) {
    std::vector<fs::path> paths;
    for (const auto& path : given) paths.push_back(choose(path));
    std::list<ReadLock> locks;
    for (const auto& path : paths) locks.emplace_back(path);
    try {
      return act(paths, locks);
    } catch (const CheckpointError&) {
      std::vector<fs::path> now = paths;
      auto lock = locks.begin();
      for (size_t i = 0; i < paths.size() && lock != locks.end(); ++i, ++lock)
        if (fs::path moved = lock->moved_from(paths[i]); !moved.empty()) now[i] = std::move(moved);
      if (now != paths) return act(now, locks);
      const bool is_other = !std::ranges::equal(
          given, paths, [&](const auto& path, const auto& before) { return choose(path) == before; });
      if (!is_other || attempt == kMostAttempts) throw;
    }
  }
}

json slice_json(const SavedTensors& saved, const SavedSlice& slice) {
  return {{"file", saved.files[slice.file].name},
          {"begin", slice.begin},
          {"offsets", slice.box.offsets},
          {"shape", slice.box.sizes}};
}

json inspect_json(const SavedTensors& saved, const Manifest* manifest) {
  json result{{"files", json::array()}, {"tensors", json::object()}, {"bytes", bytes_of(saved)}};
  for (const auto& file : saved.files) result["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  for (const auto& [name, tensor] : saved.tensors) {
    json& entry = result["tensors"][name];
    entry = {{"dtype", safetensors_name(tensor.dtype).value()},
             {"shape", tensor.shape},
             {"bytes", bytes_of(tensor)},
             {"aliases", tensor.aliases},
             {"slices", json::array()}};
    for (const auto& slice : tensor.slices) entry["slices"].push_back(slice_json(saved, slice));
  }
  if (manifest == nullptr) return result;
  result["world_size"] = manifest->world_size;
  result["sequence"] = manifest->sequence;
  result["extra"] = manifest->extra;
  const bool are_named = !manifest->optimizers.empty() && !manifest->optimizers.begin()->first.empty();
  result["optimizer"] = json();
  result[are_named ? "optimizers" : "optimizer"] = optimizers_to_json(manifest->optimizers);
  if (!manifest->models.empty()) result["models"] = manifest->models;
  return result;
}

// Prints tensors as a tree, in which common parts of names occur once.
void print_tree(const SavedTensors& saved, bool slices) {
  std::vector<std::string> open;  // parts of the name that earlier lines have printed
  for (const auto& [name, tensor] : saved.tensors) {
    std::vector<std::string> parts;
    size_t begin = 0;
    for (size_t dot; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1)
      parts.push_back(name.substr(begin, dot - begin));
    size_t same = 0;
    while (same < parts.size() && same < open.size() && parts[same] == open[same]) ++same;
    for (size_t depth = same; depth < parts.size(); ++depth)
      std::printf("%*s%s\n", static_cast<int>(2 * depth), "", parts[depth].c_str());
    const std::string leaf(2 * parts.size(), ' ');
    size_t holders = tensor.slices.size();
    for (const auto& run : tensor.runs) holders += static_cast<size_t>(run.count);
    std::printf("%-36s %-5s %-18s %10s  %zu %s%s", (leaf + name.substr(begin)).c_str(),
                safetensors_name(tensor.dtype).value().c_str(), to_string(tensor.shape).c_str(),
                human_bytes(bytes_of(tensor)).c_str(), holders, saved.by_rank ? "rank" : "slice",
                holders == 1 ? "" : "s");
    for (const auto& alias : tensor.aliases) std::printf(", also %s", alias.c_str());
    std::printf("\n");
    for (const auto& slice : tensor.slices)
      if (slices)
        std::printf("%s  %s in %s at byte %lld\n", leaf.c_str(), to_string(slice.box).c_str(),
                    saved.files[slice.file].name.c_str(), static_cast<long long>(slice.begin));
    open = std::move(parts);
  }
}

void inspect_one(const Arguments& arguments, const fs::path& path) {
  std::optional<Manifest> manifest;
  if (is_checkpoint(path)) manifest = read_manifest(path);
  // Only the files of the ranks contain the place of each slice.
  const bool lists = arguments.json || arguments.slices;
  const SavedTensors saved = !manifest ? find_tensors(path)
                             : lists   ? with_every_slice(manifest->saved)
                                       : manifest->saved;
  if (arguments.json) {
    print_json(inspect_json(saved, manifest ? &*manifest : nullptr));
    return;
  }
  std::printf("%s: %s, %s", path.c_str(), counted(std::ssize(saved.tensors), "tensor").c_str(),
              human_bytes(bytes_of(saved)).c_str());
  if (!saved.by_rank) std::printf(" in %s", counted(std::ssize(saved.files), "file").c_str());
  std::printf("\n");
  if (manifest) {
    std::string optimizers;
    for (const auto& [name, optimizer] : manifest->optimizers)
      optimizers += (optimizers.empty() ? "" : ", ") + (name.empty() ? "" : name + " ") + optimizer.kind;
    std::printf("saved by %s, number %lld; optimizer %s; extra %s\n", counted(manifest->world_size, "rank").c_str(),
                static_cast<long long>(manifest->sequence), optimizers.empty() ? "none" : optimizers.c_str(),
                manifest->extra.dump().c_str());
  }
  std::printf("\n");
  print_tree(saved, arguments.slices);
}

}  // namespace

void require_range(const std::string& option, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw std::invalid_argument("--" + option + " is " + std::to_string(value) + ", expected " + std::to_string(least) +
                                " to " + std::to_string(most));
}

void print_json(const json& value) {
  std::printf("%s\n", value.dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace).c_str());
}

int inspect(const Arguments& arguments) {
  read_beside_jobs({arguments.paths[0]}, resolve, [&](const auto& paths, auto&) { inspect_one(arguments, paths[0]); });
  return 0;
}

int verify(const Arguments& arguments) {
  fs::path path;
  std::vector<std::string> problems;
  int64_t bytes = 0;
  auto act = [&](const auto& paths, auto&) {
    path = paths[0];
    problems.clear();
    static_cast<void>(read_manifest_text(path));  // a missing file is an error, not damage
    try {
      bytes = bytes_of(read_manifest(path).saved);
      ProgressBar bar("verifying", bytes);
      problems = verify_checkpoint(path, [&](int64_t more) { bar.add(more); });
    } catch (const StorageUnavailable&) {
      throw;  // an error, not damage
    } catch (const CheckpointError& error) {
      problems.emplace_back(error.what());
    }
    if (!problems.empty()) throw CheckpointError(problems[0]);
  };
  try {
    read_beside_jobs({arguments.paths[0]}, checkpoint_of, act);
  } catch (const CheckpointError&) {
    if (problems.empty()) throw;
  }
  if (arguments.json) {
    print_json({{"path", path.string()}, {"sound", problems.empty()}, {"bytes", bytes}, {"problems", problems}});
  } else if (problems.empty()) {
    std::printf("%s: sound, %s verified\n", path.c_str(), human_bytes(bytes).c_str());
  } else {
    for (const auto& problem : problems) std::printf("%s\n", problem.c_str());
  }
  return problems.empty() ? 0 : 1;
}

int consolidate(const Arguments& arguments) {
  read_beside_jobs({arguments.paths[0]}, checkpoint_of, [&](const auto& paths, auto&) {
    const fs::path& from = paths[0];
    ProgressBar bar("consolidating", bytes_of(read_manifest(from).saved));
    consolidate_checkpoint(from, arguments.paths[1], arguments.state, {.max_file_bytes = arguments.max_file_bytes},
                           [&](int64_t bytes) { bar.add(bytes); });
    if (arguments.json) print_json({{"from", from.string()}, {"to", arguments.paths[1].string()}});
  });
  return 0;
}

int reshard(const Arguments& arguments) {
  read_beside_jobs({arguments.paths[0]}, checkpoint_of, [&](const auto& paths, std::list<ReadLock>& locks) {
    const fs::path &from = paths[0], &to = arguments.paths[1];
    std::error_code error;
    if (fs::equivalent(from, to, error)) locks.clear();  // a lock would keep the replaced checkpoint from removal
    ProgressBar bar("resharding", bytes_of(read_manifest(from).saved));
    reshard_checkpoint(from, to, *arguments.ranks, [&](int64_t bytes) { bar.add(bytes); });
    if (arguments.json) print_json({{"from", from.string()}, {"to", to.string()}, {"ranks", *arguments.ranks}});
  });
  return 0;
}

int diff(const Arguments& arguments) {
  std::vector<TensorDifference> differences;
  read_beside_jobs({arguments.paths[0], arguments.paths[1]}, resolve, [&](const auto& paths, auto&) {
    const fs::path &a = paths[0], &b = paths[1];
    ProgressBar bar("comparing", bytes_of(find_tensors(a)) + bytes_of(find_tensors(b)));
    differences = diff_checkpoints(a, b, {.tolerance = arguments.tolerance, .only_parameters = arguments.parameters},
                                   [&](int64_t bytes) { bar.add(bytes); });
  });
  json result = json::array();
  for (const auto& difference : differences) {
    if (arguments.json) {
      result.push_back({{"name", difference.name},
                        {"reason", difference.reason},
                        {"different_numel", difference.different_numel},
                        {"max_difference", difference.max_difference}});
    } else if (!difference.reason.empty()) {
      std::printf("%s: %s\n", difference.name.c_str(), difference.reason.c_str());
    } else {
      std::printf("%s: %lld elements differ, by %g at most\n", difference.name.c_str(),
                  static_cast<long long>(difference.different_numel), difference.max_difference);
    }
  }
  if (arguments.json) print_json(result);
  if (!arguments.json && differences.empty()) std::printf("the same\n");
  return differences.empty() ? 0 : 1;
}
