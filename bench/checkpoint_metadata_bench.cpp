// Measures the manifest of a checkpoint of very many ranks: the time and memory to make it in a save, and to read it.
// The reader is one rank of a world of another size. The checkpoint's files exist, but are sparse: without data blocks.
//
// Parameters are in units, and each unit is split evenly over the ranks, as in FullyShardedDataParallel. Reading runs
// in a separate process; its memory is the difference between the peak and the start. Targets for 65,536 ranks and
// 1,000 tensors: 2 s and 200 MB.
#include <algorithm>
#include <boost/program_options.hpp>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "checkpoint/format/entries.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/save/saved_part.h"

namespace {

namespace fs = std::filesystem;
using tessera::Range;
using tessera::internal::SavedTensor;
using tessera::internal::SavedTensors;
using Clock = std::chrono::steady_clock;

constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr uint64_t kId = 42;

struct Settings {
  int64_t ranks = 65536;
  int64_t to_ranks = 50000;  // number of ranks that load
  int64_t tensors = 1000;
  int64_t of_unit = 10;   // number of tensors in a unit
  int64_t width = 16384;  // each tensor is [width, width]
  std::string folder = "out/checkpoint_metadata_bench";

  int64_t tensor_numel() const { return width * width; }
  int64_t units() const { return (tensors + of_unit - 1) / of_unit; }
  int64_t unit_numel() const { return of_unit * tensor_numel(); }
};

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::string name_of(int64_t tensor) { return "blocks." + std::to_string(tensor) + ".weight"; }

// Returns the ranges of tensors that `rank` of `world` ranks holds, by the tensors' names.
std::map<std::string, Range> held_by(const Settings& settings, int64_t rank, int64_t world) {
  const int64_t each = (settings.unit_numel() + world - 1) / world;
  std::map<std::string, Range> held;
  for (int64_t unit = 0; unit < settings.units(); ++unit) {
    const Range own{std::min(rank * each, settings.unit_numel()), std::min((rank + 1) * each, settings.unit_numel())};
    for (int64_t i = own.begin / settings.tensor_numel(); i * settings.tensor_numel() < own.end; ++i) {
      const int64_t begin = i * settings.tensor_numel();
      const Range part{std::max(own.begin - begin, int64_t{0}), std::min(own.end - begin, settings.tensor_numel())};
      if (const int64_t tensor = unit * settings.of_unit + i; tensor < settings.tensors && part.numel() > 0)
        held[name_of(tensor)] = part;
    }
  }
  return held;
}

SavedTensor tensor_of(const Settings& settings) {
  return {.dtype = at::kFloat, .shape = {settings.width, settings.width}};
}

std::string part_text(const Settings& settings, int64_t rank) {
  SavedTensors saved{.block_bytes = kBlockBytes, .by_rank = true, .id = kId};
  for (const auto& [name, range] : held_by(settings, rank, settings.ranks)) {
    SavedTensor& tensor = saved.tensors[name] = tensor_of(settings);
    tensor.runs.push_back({rank, 0, 1, range.begin, range.numel()});
  }
  tessera::internal::SavedPart part(settings.ranks);
  part.set(std::move(saved), {});
  return part.text();
}

// Writes the header of a rank's files, and a hole for the data.
void write_rank(const Settings& settings, int64_t rank) {
  std::vector<std::vector<tessera::internal::SafetensorsEntry>> files;
  for (const auto& [name, range] : held_by(settings, rank, settings.ranks)) {
    const auto boxes = tessera::internal::boxes_by_file(tensor_of(settings), range);
    files.resize(std::max(files.size(), boxes.size()));
    for (size_t k = 0; k < boxes.size(); ++k) files[k].push_back({name, at::kFloat, boxes[k].sizes});
  }
  for (size_t k = 0; k < files.size(); ++k) {
    const std::string header = tessera::internal::format_rank_header(
        files[k], {{"format", "pt"}}, {rank, kId, kBlockBytes, {{"cpu", std::string(5056, 'x')}}}, {}, k == 0);
    const auto file =
        tessera::internal::create_file(fs::path(settings.folder) / tessera::internal::rank_file_name(rank, k));
    file.write(header.data(), static_cast<int64_t>(header.size()), 0);
    file.resize(files[k].back().begin + files[k].back().bytes);
  }
}

void make(const Settings& settings) {
  fs::remove_all(settings.folder);
  fs::create_directories(settings.folder);
  const auto group = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(settings.ranks))));
  tessera::internal::SavedPart all(settings.ranks);
  double leader_s = 0, root_s = 0;
  for (int64_t first = 0; first < settings.ranks; first += group) {
    std::vector<std::string> texts;
    for (int64_t rank = first; rank < std::min(first + group, settings.ranks); ++rank)
      texts.push_back(part_text(settings, rank));
    auto began = Clock::now();
    tessera::internal::SavedPart part(settings.ranks);
    for (const auto& text : texts) part.add(text, "a rank");
    const std::string text = part.text();
    leader_s = std::max(leader_s, seconds_since(began));
    began = Clock::now();
    all.add(text, "a group");
    root_s += seconds_since(began);
  }
  const auto began = Clock::now();
  auto manifest = std::move(all).manifest({});
  manifest.saved.block_bytes = kBlockBytes;
  manifest.saved.has_rng = true;
  manifest.id = manifest.saved.id = kId;
  const std::string text = tessera::internal::format_manifest(manifest);
  tessera::internal::write_text(fs::path(settings.folder) / tessera::internal::kManifestName, text);
  root_s += seconds_since(began);
  std::cout << settings.ranks << " ranks, " << settings.tensors << " tensors: manifest of " << text.size() / 1000
            << " kB; made in " << leader_s << " s by the slowest of the groups' first ranks and " << root_s
            << " s by rank 0\n";
}

int64_t kilobytes(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(field)) return std::atoll(line.c_str() + std::string(field).size() + 1);
  throw std::runtime_error("/proc/self/status has no " + std::string(field));
}

// Loads the tensors of the rank in the middle of the new world.
void read(const Settings& settings, bool writes_files) {
  const auto wanted = held_by(settings, settings.to_ranks / 2, settings.to_ranks);
  if (writes_files) {
    const auto saved = tessera::internal::read_manifest(settings.folder).saved;
    std::set<int64_t> ranks;
    for (const auto& [name, range] : wanted)
      tessera::internal::for_each_holder(saved.tensors.at(name), range,
                                         [&](int64_t rank, Range) { ranks.insert(rank); });
    for (const int64_t rank : ranks) write_rank(settings, rank);
    return;
  }
  const int64_t before_kb = kilobytes("VmRSS:");
  const auto began = Clock::now();
  const auto saved = tessera::internal::read_manifest(settings.folder).saved;
  std::map<std::pair<int64_t, size_t>, std::vector<std::pair<std::string, tessera::internal::Box>>> files;
  for (const auto& [name, range] : wanted)
    tessera::internal::for_each_holder(saved.tensors.at(name), range, [&, &key = name](int64_t rank, Range held) {
      const auto boxes = tessera::internal::boxes_by_file(saved.tensors.at(key), held);
      for (size_t k = 0; k < boxes.size(); ++k) files[{rank, k}].emplace_back(key, boxes[k]);
    });
  int64_t slices = 0;
  for (const auto& [place, boxes] : files) {
    const auto file = tessera::internal::open_file(fs::path(settings.folder) /
                                                   tessera::internal::rank_file_name(place.first, place.second));
    const auto rank_file = tessera::internal::read_rank_file(*file, saved, place.first);
    for (const auto& [name, box] : boxes)
      slices += rank_file.slice(name, saved.tensors.at(name), box, kBlockBytes, "f").begin > 0 ? 1 : 0;
  }
  std::cout << "read by one of " << settings.to_ranks << " ranks in " << seconds_since(began) << " s, "
            << (kilobytes("VmHWM:") - before_kb) / 1000 << " MB: " << slices << " slices in " << files.size()
            << " files\n";
}

}  // namespace

int main(int argc, char** argv) try {
  namespace po = boost::program_options;
  Settings settings;
  std::string step;
  po::options_description options("Options");
  auto add = options.add_options();
  add("help,h", "this text");
  add("ranks", po::value(&settings.ranks)->default_value(settings.ranks), "that saved");
  add("to-ranks", po::value(&settings.to_ranks)->default_value(settings.to_ranks), "that load");
  add("tensors", po::value(&settings.tensors)->default_value(settings.tensors), "parameters");
  add("dir", po::value(&settings.folder)->default_value(settings.folder), "where to write; emptied first");
  add("step", po::value(&step), "for the program itself: make, files or read alone");
  po::variables_map values;
  po::store(po::parse_command_line(argc, argv, options), values);
  po::notify(values);
  if (values.count("help") > 0) return std::cout << options, 0;
  if (settings.ranks < 1 || settings.to_ranks < 1 || settings.tensors < 1)
    throw std::invalid_argument("--ranks, --to-ranks and --tensors must be 1 or more");
  if (step == "make") return make(settings), 0;
  if (step == "files" || step == "read") return read(settings, step == "files"), 0;
  for (const char* each : {"make", "files", "read"}) {
    std::ostringstream command;
    command << argv[0] << " --step " << each << " --ranks " << settings.ranks << " --to-ranks " << settings.to_ranks
            << " --tensors " << settings.tensors << " --dir " << settings.folder;
    if (std::system(command.str().c_str()) != 0) return 1;
  }
  fs::remove_all(settings.folder);
  return 0;
} catch (const std::exception& error) {
  std::cerr << "checkpoint_metadata_bench: " << error.what() << "\n";
  return 2;
}
