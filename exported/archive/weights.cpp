#include "exported/archive/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <set>

#include <tessera/errors.h>
#include "checkpoint/format/box.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"
#include "exported/archive/fields.h"

namespace tessera::internal {

using nlohmann::json;

// ---- descriptions -------------------------------------------------------------------------------

namespace {

std::vector<int64_t> fixed_numbers(const json& list) {
  std::vector<int64_t> numbers;
  for (const json& number : list) {
    numbers.push_back(int_field(number, "as_int"));
    if (numbers.back() < 0) throw ExportedError("a size or stride is negative");
  }
  return numbers;
}

// Returns the number of storage elements between the tensor's first and last element, inclusive; nullopt if above 2^62.
std::optional<int64_t> extent_of(const ExportedTensor& tensor) {
  constexpr int64_t kLimit = int64_t{1} << 62;
  int64_t extent = 1;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    if (tensor.sizes[i] == 0) return 0;
    int64_t step = 0;
    if (__builtin_mul_overflow(tensor.sizes[i] - 1, tensor.strides[i], &step) ||
        __builtin_add_overflow(extent, step, &extent) || extent > kLimit)
      return std::nullopt;
  }
  return extent;
}

ExportedTensor read_tensor(const Archive& archive, const std::string& name, const json& entry,
                           const std::string& folder) try {
  if (bool_field(entry, "use_pickle"))
    throw ExportedError("it is pickled, which is not read: it is a custom object or a subclass of Tensor");
  const json& meta = object_field(entry, "tensor_meta");
  ExportedTensor tensor{name,
                        dtype_of_export(field(meta, "dtype")),
                        fixed_numbers(list_field(meta, "sizes")),
                        fixed_numbers(list_field(meta, "strides")),
                        int_field(field(meta, "storage_offset"), "as_int"),
                        bool_field(meta, "requires_grad")};
  tensor.storage_name = folder + text_field(entry, "path_name");
  tensor.storage = archive.member(tensor.storage_name);
  if (layout_of_export(field(meta, "layout")) != static_cast<int64_t>(at::kStrided) ||
      tensor.sizes.size() != tensor.strides.size())
    throw ExportedError("it is not an ordinary dense tensor");
  const auto extent = extent_of(tensor);
  const int64_t held = tensor.storage.bytes / static_cast<int64_t>(c10::elementSize(tensor.dtype));
  if (!extent || !tensor_bytes(tensor.sizes, tensor.dtype) || tensor.offset < 0 ||
      (tensor.storage.bytes > 0 && *extent > 0 && (tensor.offset > held || *extent > held - tensor.offset)))
    throw ExportedError("it reaches beyond its storage of " + std::to_string(tensor.storage.bytes) + " bytes");
  return tensor;
} catch (const ExportedError& error) {
  throw ExportedError("'" + name + "': " + error.what());
}

}  // namespace

bool ExportedTensor::has_values() const { return storage.bytes > 0 || numel_of(sizes) == 0; }

std::map<std::string, ExportedTensor> read_tensors(const Archive& archive, const ExportRecord& record,
                                                   const std::string& config, const std::string& folder) {
  const json parsed = parse_archive_json(archive.text(config), config);
  std::map<std::string, ExportedTensor> tensors;
  for (const auto& [name, entry] : object_field(parsed, "config").items())
    tensors.emplace(name, read_tensor(archive, name, entry, folder));
  // Gives tied tensors that have no values the same storage name. Only the export record lists ties of such tensors.
  std::map<std::string, std::string> tied;
  if (record.ties)
    for (const auto& names : *record.ties)
      for (const std::string& name : names) tied[name] = names.front();
  for (auto& [name, tensor] : tensors) {
    if (tensor.storage.bytes > 0) continue;
    const auto first = tied.find(name);
    tensor.storage_name = "of " + (first == tied.end() ? name : first->second);
  }
  return tensors;
}

// ---- weights in the archive ---------------------------------------------------------------------

WeightSource read_from(const std::shared_ptr<ArchiveFile>& file, const ExportedTensor& tensor, bool is_checked,
                       std::shared_ptr<std::atomic<int64_t>> bytes_read) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t first = tensor.storage.begin + tensor.offset * element_bytes;
  return {tensor.dtype, [file, first, element_bytes, storage = tensor.storage, name = tensor.storage_name, is_checked,
                         bytes_read = std::move(bytes_read)](Range elements, void* target) {
            if (is_checked && elements.begin == 0) file->check_member(storage, name);
            const int64_t bytes = elements.numel() * element_bytes;
            file->read(target, bytes, first + elements.begin * element_bytes);
            *bytes_read += bytes;
          }};
}

at::Tensor StorageReader::read(const ExportedTensor& tensor) {
  const auto options = at::TensorOptions(at::kCPU).dtype(tensor.dtype);
  if (numel_of(tensor.sizes) == 0) return at::empty_strided(tensor.sizes, tensor.strides, options);
  std::weak_ptr<at::Tensor>& known = storages_[tensor.storage.begin];
  std::shared_ptr<at::Tensor> storage = known.lock();
  if (!storage) {
    storage = std::make_shared<at::Tensor>(at::empty({tensor.storage.bytes}, options.dtype(at::kByte)));
    file_->read_member(tensor.storage, tensor.storage_name, storage->mutable_data_ptr(), is_checked_);
    known = storage;
  }
  char* const first = static_cast<char*>(storage->mutable_data_ptr()) +
                      tensor.offset * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  return at::from_blob(first, tensor.sizes, tensor.strides, [storage](void* /*first*/) {}, options);
}

// ---- safetensors --------------------------------------------------------------------------------

struct WeightFiles::Files {
  SavedTensors saved;
  std::map<std::string, std::string> canonical;  // from aliases to tensor names in the files
  SliceReader reader;
  std::shared_ptr<std::atomic<int64_t>> bytes_read;
  std::set<std::string> used;

  Files(const std::filesystem::path& path, std::shared_ptr<std::atomic<int64_t>> counter)
      : saved(find_full_tensors(path)), reader(saved), bytes_read(std::move(counter)) {
    for (const auto& [name, tensor] : saved.tensors)
      for (const std::string& alias : tensor.aliases) canonical[alias] = name;
  }

  // Throws ExportedError if the tensor was saved under several names and its values differ.
  void read(const std::set<std::string>& names, const ExportedTensor& tensor, Range elements, void* target) {
    const int64_t before = reader.bytes_read();
    const std::string& first = *names.begin();
    std::string other;
    for (const std::string& name : names) {
      const at::ScalarType dtype = saved.tensors.at(name).dtype;
      if (name != first) other.resize(static_cast<size_t>(elements.numel()) * c10::elementSize(dtype));
      void* const to = name == first ? target : other.data();
      for (const Segment& segment : segments_of(tensor.sizes, tensor.strides, elements))
        reader.want(name, segment.box, to, tensor.strides, elements.begin);
      reader.fetch();
      if (name != first &&
          (dtype != saved.tensors.at(first).dtype || std::memcmp(other.data(), target, other.size()) != 0))
        throw ExportedError("'" + first + "' and '" + name + "' are tied in the model, saved with other values " +
                            "(ExportedOptions::weight_name maps both to one)");
    }
    *bytes_read += reader.bytes_read() - before;
  }
};

WeightFiles::WeightFiles(const std::filesystem::path& path, std::shared_ptr<std::atomic<int64_t>> bytes_read)
    : files_(std::make_shared<Files>(path, std::move(bytes_read))) {}

WeightFiles::~WeightFiles() = default;

std::optional<WeightSource> WeightFiles::find(const std::vector<std::string>& names, const ExportedTensor& tensor) {
  std::set<std::string> found;  // several if a tied tensor was saved under each of its names
  for (const std::string& name : names) {
    const auto alias = files_->canonical.find(name);
    const auto own = files_->saved.tensors.find(alias == files_->canonical.end() ? name : alias->second);
    if (own == files_->saved.tensors.end()) continue;
    if (own->second.shape != tensor.sizes)
      throw ExportedError("'" + own->first + "' is " + to_string(own->second.shape) +
                          " in the weights, the model has " + to_string(tensor.sizes));
    found.insert(own->first);
  }
  if (found.empty()) return std::nullopt;
  files_->used.insert(found.begin(), found.end());
  return WeightSource{
      files_->saved.tensors.at(*found.begin()).dtype,
      [files = files_, found, tensor](Range elements, void* target) { files->read(found, tensor, elements, target); }};
}

std::vector<std::string> WeightFiles::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : files_->saved.tensors)
    if (!files_->used.contains(name)) names.push_back(name);
  return names;
}

ReadElements converted(WeightSource source, at::ScalarType dtype) {
  if (source.dtype == dtype) return std::move(source.read);
  return [source = std::move(source), dtype](Range elements, void* target) {
    const at::Tensor own = at::empty({elements.numel()}, at::TensorOptions(at::kCPU).dtype(source.dtype));
    source.read(elements, own.mutable_data_ptr());
    at::from_blob(target, {elements.numel()}, at::TensorOptions(at::kCPU).dtype(dtype)).copy_(own);
  };
}

}  // namespace tessera::internal
