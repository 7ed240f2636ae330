#include <ATen/core/grad_mode.h>

#include <cstring>
#include <map>

#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/full_layout.h"
#include "tessera/checkpoint/outcome.h"
#include "tessera/checkpoint/saved_state.h"
#include "tessera/comm/agreement.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBufferBytes = int64_t{4} << 20;

void make_drafts(const FullLayout& layout) {
  std::error_code error;
  const fs::path folder = fs::absolute(layout.files.front().path).parent_path();
  fs::create_directories(folder, error);
  if (error) throw CheckpointError(folder.string() + ": creating: " + error.message());
  for (const auto& full : layout.files) {
    if (fs::is_directory(full.path, error))
      throw CheckpointError(full.path.string() + ": is a directory; a file's name is expected");
    fs::remove(draft_of(full.path), error);
    const File file = create_file(draft_of(full.path));
    file.write(full.header.data(), static_cast<int64_t>(full.header.size()), 0);
    file.resize(full.bytes);
  }
}

// Where each tensor is: file number and first byte.
std::map<std::string, std::pair<size_t, int64_t>> places_of(const FullLayout& layout) {
  std::map<std::string, std::pair<size_t, int64_t>> places;
  for (size_t i = 0; i < layout.files.size(); ++i)
    for (const auto& entry : layout.files[i].entries) places[entry.name] = {i, entry.begin};
  return places;
}

// Writes a box to its place in the whole tensor, which begins at `begin`: in runs, neighbouring
// ones together.
void write_box(const File& file, const Piece& piece, int64_t begin) {
  const at::Tensor data = piece.data();
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

void write_own_part(const FullLayout& layout, const std::vector<Piece>& pieces) {
  const auto places = places_of(layout);
  std::map<size_t, File> files;
  for (const Piece& piece : pieces) {
    const auto [index, begin] = places.at(piece.name);
    auto found = files.find(index);
    if (found == files.end())
      found = files.emplace(index, open_file_to_write(draft_of(layout.files[index].path))).first;
    write_box(found->second, piece, begin);
  }
  for (auto& [index, file] : files) file.sync();
}

}  // namespace

void save_full(const fs::path& file, ModelShards& model, const SaveFullOptions& options) {
  const at::NoGradGuard no_grad;
  Communicator& comm = *model.comm();
  const std::string what = "saving " + file.string();
  require_agreement(comm, "where to save the model",
                    {"file " + file.string(), "max_file_bytes " + std::to_string(options.max_file_bytes)});
  FullLayout layout;
  std::vector<LocalTensor> tensors;
  auto discard_drafts = [&] {
    if (comm.rank() == 0 && !layout.files.empty()) discard(layout);
  };
  // Each stage on all ranks before the next: the drafts are there, their parts are written, all is visible.
  auto stage = [&](const std::function<void()>& part) {
    try {
      settle(comm, attempt([&] { return part(), std::string(); }), what);
    } catch (...) {
      discard_drafts();
      throw;
    }
  };
  stage([&] {
    if (!file.has_filename()) throw std::invalid_argument("'" + file.string() + "' is not a name for a file");
    tensors = local_tensors(model, model.named_shards(), nullptr);
    std::vector<FullTensor> all;
    for (const auto& tensor : tensors)
      all.push_back({tensor.name, tensor.elements.scalar_type(), tensor.sizes, tensor.aliases});
    layout = plan_full_files(file, all, options);
    if (comm.rank() == 0) make_drafts(layout);
  });
  stage([&] { write_own_part(layout, pieces_of(tensors, comm.rank())); });
  stage([&] {
    if (comm.rank() != 0) return;
    for (const auto& full : layout.files) open_file_to_write(draft_of(full.path)).sync();
    publish(layout);
  });
}

void write_full(const fs::path& file, const std::vector<FullTensor>& tensors,
                const std::function<at::Tensor(const FullTensor&)>& data, const SaveFullOptions& options,
                const std::function<void(int64_t)>& progress) {
  const FullLayout layout = plan_full_files(file, tensors, options);
  make_drafts(layout);
  try {
    const auto places = places_of(layout);
    for (const FullTensor& tensor : tensors) {
      const auto [index, begin] = places.at(tensor.name);
      const at::Tensor values = data(tensor);
      if (values.sizes() != at::IntArrayRef(tensor.shape) || values.scalar_type() != tensor.dtype ||
          !values.is_contiguous())
        throw std::logic_error("the data of '" + tensor.name + "' is not what was announced");
      const File draft = open_file_to_write(draft_of(layout.files[index].path));
      write_box(draft,
                {.name = tensor.name,
                 .dtype = tensor.dtype,
                 .shape = tensor.shape,
                 .box = whole_box(tensor.shape),
                 .data = [&] { return values; }},
                begin);
      if (progress) progress(static_cast<int64_t>(values.nbytes()));
    }
    for (const auto& full : layout.files) open_file_to_write(draft_of(full.path)).sync();
    publish(layout);
  } catch (...) {
    discard(layout);
    throw;
  }
}

}  // namespace tessera
