#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include <tessera/checkpoint/full_file.h>
#include <tessera/errors.h>
#include <tessera/host_results.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/entries.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/save/outcome.h"
#include "checkpoint/state/saved_state.h"
#include "core/runtime/host.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBufferBytes = int64_t{4} << 20;

// The planned files of a save, and the position of each tensor in them. A value type that accesses no file.
struct FullLayout {
  struct FullFile {
    fs::path path;
    std::string start;  // the first bytes of the file: the header, or the whole text of an index
    int64_t bytes = 0;
  };
  struct Position {
    size_t file = 0;
    int64_t begin = 0;
  };
  std::vector<FullFile> files;  // renaming the last file (the only file, or the index) commits the save
  std::map<std::string, Position> positions;
};

// A tensor's name in the file, and whether the file stores the tensor transposed. Name "": the file omits the tensor.
struct FileTensor {
  std::string name;
  bool is_transposed = false;
};
using FileTensors = std::map<std::string, FileTensor>;  // by the model's name

// Returns the tensors with their names and shapes in the file, without omitted ones. Fills `in_file` for all tensors.
std::vector<FullTensor> translate(std::vector<FullTensor> tensors, const SaveFullOptions& options,
                                  FileTensors& in_file) {
  std::vector<FullTensor> stored;
  std::map<std::string, std::string> sources;
  for (FullTensor& tensor : tensors) {
    const std::string own = tensor.name;
    const bool is_transposed = options.transposed && options.transposed(own);
    require(!is_transposed || tensor.shape.size() == 2, "SaveFullOptions::transposed: '", own, "' has ",
            tensor.shape.size(), " dimensions, expected 2");
    if (is_transposed) std::swap(tensor.shape[0], tensor.shape[1]);
    std::vector<std::string> names{own};
    names.insert(names.end(), tensor.aliases.begin(), tensor.aliases.end());
    if (options.rename) std::ranges::transform(names, names.begin(), options.rename);
    std::erase(names, "");
    for (const std::string& name : names)
      if (const auto [source, is_new] = sources.try_emplace(name, own); !is_new)
        throw std::invalid_argument("SaveFullOptions::rename: '" + source->second + "' and '" + own + "' are both '" +
                                    name + "' in the file");
    in_file[own] = {names.empty() ? "" : names[0], is_transposed};
    if (names.empty()) continue;
    tensor.name = names[0];
    tensor.aliases.assign(names.begin() + 1, names.end());
    stored.push_back(std::move(tensor));
  }
  return stored;
}

// Gives the model's pieces their names and boxes in the file. Removes the pieces of omitted tensors.
std::vector<Piece> translate(std::vector<Piece> pieces, const FileTensors& in_file) {
  std::erase_if(pieces, [&](const Piece& piece) { return in_file.at(piece.name).name.empty(); });
  for (Piece& piece : pieces) {
    const FileTensor& stored = in_file.at(piece.name);
    piece.name = stored.name;
    if (!stored.is_transposed) continue;
    for (auto* list : {&piece.shape, &piece.box.offsets, &piece.box.sizes}) std::swap(list->at(0), list->at(1));
    piece.data = [data = piece.data] { return data().t().contiguous(); };
  }
  return pieces;
}

// Returns one line for each tensor, which the caller compares over ranks.
std::vector<std::string> lines_of(const FileTensors& in_file) {
  std::vector<std::string> lines;
  for (const auto& [own, stored] : in_file)
    lines.push_back("'" + own + "' as '" + stored.name + "'" + (stored.is_transposed ? ", transposed" : ""));
  return lines;
}

// Splits the tensors, in order, into groups of at most max_bytes (0: no limit). A larger tensor forms its own group.
std::vector<std::vector<const FullTensor*>> group_by_bytes(const std::vector<FullTensor>& tensors, int64_t max_bytes) {
  std::vector<std::vector<const FullTensor*>> groups(1);
  int64_t bytes = 0;
  for (const FullTensor& tensor : tensors) {
    check_dtype(tensor.name, tensor.dtype);
    check_tensor_name(tensor.name, "a full file");
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

fs::path index_path(const fs::path& file) { return file.string() + ".index.json"; }

// Throws std::invalid_argument for a name that readers would take for an index or a checkpoint's manifest.
void check_file_name(const fs::path& file) {
  if (!file.has_filename()) throw std::invalid_argument("'" + file.string() + "' is not a name for a file");
  const std::string name = file.filename().string();
  if (name == kManifestName || name.ends_with(".index.json"))
    throw std::invalid_argument("'" + file.string() + "' is not a name for a file of tensors: '" + name +
                                "' is that of " + (name == kManifestName ? "a checkpoint's manifest" : "an index"));
}

// Returns the path of file `i` of `count`. `tag` makes the names differ from the file names of older saves.
fs::path part_path_of(const fs::path& file, const std::string& tag, size_t i, size_t count) {
  fs::path path = file;
  return path.replace_filename(file.stem().string() + tag + "-" + five_digits(static_cast<int64_t>(i) + 1) + "-of-" +
                               five_digits(static_cast<int64_t>(count)) + file.extension().string());
}

FullLayout plan_full_files(const fs::path& file, const std::vector<FullTensor>& tensors, const SaveFullOptions& options,
                           const std::string& tag) {
  require(!is_remote(file), "'", file.string(),
          "' is not a local file: whole models are written to local folders, and copied from there");
  require(options.max_file_bytes >= 0, "max_file_bytes is ", options.max_file_bytes, ", expected 0 or more");
  const auto groups = group_by_bytes(tensors, options.max_file_bytes);
  FullLayout layout;
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total_bytes = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const fs::path path = groups.size() > 1 ? part_path_of(file, tag, i, groups.size()) : file;
    std::vector<SafetensorsEntry> entries;
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    for (const FullTensor* tensor : groups[i]) {
      entries.push_back({tensor->name, tensor->dtype, tensor->shape});
      for (const auto& alias : tensor->aliases) metadata[alias] = tensor->name;
      weight_map[tensor->name] = path.filename().string();
    }
    const std::string header = format_safetensors_header(entries, metadata);
    int64_t bytes = 0;
    for (const auto& entry : entries) {
      layout.positions[entry.name] = {i, entry.begin};
      bytes += entry.bytes;
    }
    total_bytes += bytes;
    layout.files.push_back({path, header, static_cast<int64_t>(header.size()) + bytes});
  }
  if (groups.size() > 1) {
    const nlohmann::json index{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
    const std::string text = index.dump(2) + "\n";
    layout.files.push_back({index_path(file), text, static_cast<int64_t>(text.size())});
  }
  return layout;
}

// Returns the hidden path under which a file is written until it is renamed to `path`.
fs::path draft_of(const fs::path& path) { return path.parent_path() / ("." + path.filename().string() + ".draft"); }

// Lists the files of older saves to `file`: the file, its index, and indexed files whose names start with its stem.
std::vector<fs::path> files_before(const fs::path& file) {
  std::vector<fs::path> files;
  std::error_code ignored;
  if (fs::exists(file, ignored)) files.push_back(file);
  if (!fs::exists(index_path(file), ignored)) return files;
  files.push_back(index_path(file));
  const auto index = nlohmann::json::parse(std::ifstream(index_path(file)), nullptr, /*allow_exceptions=*/false);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) return files;
  std::set<std::string> names;
  for (const auto& [tensor, name] : index["weight_map"].items())
    if (name.is_string() && name.get<std::string>().find('/') == std::string::npos &&
        name.get<std::string>().starts_with(file.stem().string() + "-"))
      names.insert(name.get<std::string>());
  for (const auto& name : names) files.push_back(file.parent_path() / name);
  return files;
}

// Returns a random tag for the names of new part files, or "" if no part file of an older save exists.
std::string free_tag(const fs::path& file) {
  std::error_code error;
  const std::string start = file.stem().string() + "-";
  const fs::path folder = fs::absolute(file).parent_path();
  const auto entries = entries_of(folder, error);
  if (error && error != std::errc::no_such_file_or_directory)
    throw CheckpointError(folder.string() + ": opening: " + error.message());
  for (const auto& entry : entries)
    if (const auto name = entry.path().filename().string();
        name.starts_with(start) && name.find("-of-") != std::string::npos)
      return "-" + to_hex(random_bits()).substr(0, 8);
  return "";
}

void check_replaceable(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    throw CheckpointError(path.string() + ": is a directory; a file's name is expected");
  // Refuses devices, because the rename would replace a device such as /dev/null for all programs.
  if (fs::exists(path, ignored) && !fs::is_regular_file(path, ignored))
    throw CheckpointError(path.string() + ": exists and is no regular file; it is left as it is");
}

// The temporary files (drafts) of a layout. Unless publish() has committed them, the destructor removes all new files.
class Drafts {
 public:
  Drafts(const FullLayout& layout, const fs::path& file)
      : layout_(layout), file_(file), folder_(fs::absolute(layout.files[0].path).parent_path()) {}
  ~Drafts() {
    std::error_code ignored;
    for (const auto& file : layout_.files) fs::remove(draft_of(file.path), ignored);
    for (size_t i = 0; !is_visible_ && i < named_; ++i) fs::remove(layout_.files[i].path, ignored);
  }
  Drafts(const Drafts&) = delete;
  Drafts& operator=(const Drafts&) = delete;

  void create() const {
    make_directories(folder_);
    check_replaceable(file_);  // publish() removes a file at this path, even if the layout has several files
    for (const auto& full : layout_.files) {
      check_replaceable(full.path);
      std::error_code ignored;
      fs::remove(draft_of(full.path), ignored);
      const File file = create_file(draft_of(full.path));
      file.write(full.start.data(), static_cast<int64_t>(full.start.size()), 0);
      file.resize(full.bytes);
    }
  }

  // Renames the drafts to their final names. The last rename, of the index or of the only file, commits all files at
  // once. Then removes the files of older saves.
  void publish() {
    const auto before = files_before(file_);
    for (const auto& file : layout_.files) open_file_to_write(draft_of(file.path)).sync();
    for (; named_ + 1 < layout_.files.size(); ++named_)
      rename_entry(draft_of(layout_.files[named_].path), layout_.files[named_].path, false);
    sync_directory(folder_);
    rename_entry(draft_of(layout_.files.back().path), layout_.files.back().path, true);
    is_visible_ = true;
    sync_directory(folder_);
    for (const auto& old : before) {
      std::error_code ignored;
      if (std::ranges::none_of(layout_.files, [&](const auto& own) { return own.path == old; }))
        fs::remove(old, ignored);
    }
  }

 private:
  const FullLayout& layout_;
  const fs::path file_, folder_;
  size_t named_ = 0;  // number of files that publish() has renamed, not counting the last one
  bool is_visible_ = false;
};

// Writes a piece's box into a file that stores the whole tensor, row-major, from byte `begin` on.
void write_box(const File& file, const Piece& piece, int64_t begin) {
  const at::Tensor data = checked_data(piece);
  const char* from = static_cast<const char*>(data.const_data_ptr());
  const auto element_bytes = static_cast<int64_t>(data.element_size());
  for_each_run(piece.box, piece.box, row_major_strides(piece.shape), 0, [&](const Run& run) {
    for (int64_t done = 0; done < run.numel;) {
      const int64_t count = run.target_step == 1 ? std::min(run.numel - done, kBufferBytes / element_bytes) : 1;
      const int64_t position = begin + (run.target + done * run.target_step) * element_bytes;
      file.write(from + (run.source + done) * element_bytes, count * element_bytes, position);
      if (count * element_bytes == kBufferBytes) file.start_writing_out(position, kBufferBytes);
      done += count;
    }
  });
}

// Writes all pieces, one file after the other, so that only one file is open at a time.
void write_pieces_to_drafts(const FullLayout& layout, const std::vector<Piece>& pieces, const Progress& progress = {}) {
  std::map<size_t, std::vector<const Piece*>> by_file;
  for (const Piece& piece : pieces) by_file[layout.positions.at(piece.name).file].push_back(&piece);
  for (const auto& [index, own] : by_file) {
    const File file = open_file_to_write(draft_of(layout.files[index].path));
    for (const Piece* piece : own) {
      write_box(file, *piece, layout.positions.at(piece->name).begin);
      if (progress) progress(bytes_of(*piece));
    }
    file.sync();
  }
}

}  // namespace

void save_full(const fs::path& file, ModelShards& model, const SaveFullOptions& options) {
  const at::NoGradGuard no_grad;
  Communicator& comm = *model.comm();
  comm.require_values("saving the file '" + file.string() + "'");
  require_agreement(comm, "where to save the model",
                    {"file " + file.string(), "max_file_bytes " + std::to_string(options.max_file_bytes)});
  std::vector<LocalTensor> tensors;
  std::vector<FullTensor> stored;
  FileTensors in_file;
  const auto plan = [&] {  // returns free_tag(file) on rank 0, and "" on other ranks
    check_file_name(file);
    tensors = local_tensors(model, in_dense_order(model.shards_to_save()), {});
    for (const auto& local : tensors)
      stored.push_back({local.fqn, local.tensor.scalar_type(), local.sizes, local.aliases});
    stored = translate(std::move(stored), options, in_file);
    return comm.rank() == 0 ? free_tag(file) : "";
  };
  const std::string tag = gather_results(comm, attempt(plan), "saving '" + file.string() + "'")[0];
  require_agreement(comm, "the names of tensors in '" + file.string() + "'", lines_of(in_file));
  FullLayout layout;
  std::optional<Drafts> drafts;  // set only on rank 0
  // Runs in three stages: create drafts, write parts, publish files. All ranks end a stage before the next one begins.
  Heartbeat heartbeat;
  auto stage = [&](const std::function<void()>& part) {
    on_all_ranks_slowly(comm, "saving " + file.string(), heartbeat, part);
  };
  on_all_ranks(comm, "saving " + file.string(), [&] {
    layout = plan_full_files(file, stored, options, tag);
    await_current_stream(comm.device());
    if (comm.rank() == 0) drafts.emplace(layout, file).create();
  });
  stage([&] {
    write_pieces_to_drafts(layout, translate(pieces_of(tensors, comm.rank()), in_file),
                           [&](int64_t) { heartbeat.beat(); });
  });
  stage([&] {
    if (drafts) drafts->publish();
  });
}

void write_full(const fs::path& file, const std::vector<FullTensor>& tensors,
                const std::function<at::Tensor(const FullTensor&)>& data, const SaveFullOptions& options,
                const std::function<void(int64_t)>& progress) {
  check_file_name(file);
  FileTensors in_file;
  const FullLayout layout = plan_full_files(file, translate(tensors, options, in_file), options, free_tag(file));
  Drafts drafts(layout, file);
  drafts.create();
  std::vector<Piece> pieces;
  for (const FullTensor& tensor : tensors)
    pieces.push_back({.name = tensor.name,
                      .dtype = tensor.dtype,
                      .shape = tensor.shape,
                      .box = whole_box(tensor.shape),
                      .data = [&] { return data(tensor); }});
  write_pieces_to_drafts(layout, translate(std::move(pieces), in_file), progress);
  drafts.publish();
}

}  // namespace tessera
