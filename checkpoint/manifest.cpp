#include "tessera/checkpoint/manifest.h"

#include <algorithm>
#include <fstream>
#include <set>

#include "tessera/checkpoint/checked_json.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/dtype.h"
#include "tessera/checkpoint/entries.h"
#include "tessera/checkpoint/errors.h"
#include "tessera/checkpoint/safetensors_header.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kKinds[] = {"parameter", "buffer", "state"};
constexpr int64_t kMaxWorld = 10'000'000;

// Letters, digits, '.', '_' and '-', no dot in front: nothing that leaves the directory.
bool is_plain_file_name(const std::string& name) {
  auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  };
  return !name.empty() && name.size() < 256 && name[0] != '.' && std::all_of(name.begin(), name.end(), is_plain);
}

std::string checksums_to_hex(const std::vector<uint64_t>& checksums) {
  std::string text;
  for (const uint64_t sum : checksums) text += to_hex(sum);
  return text;
}

std::vector<uint64_t> checksums_from_hex(const JsonObject& fields) {
  const std::string text = fields.text("checksums");
  if (text.size() % 16 != 0) fields.refuse("'checksums' is not 16 hex digits for each block");
  std::vector<uint64_t> sums;
  try {
    for (size_t i = 0; i < text.size(); i += 16) sums.push_back(from_hex(std::string_view(text).substr(i, 16)));
  } catch (const std::invalid_argument& error) {
    fields.refuse(std::string("'checksums': ") + error.what());
  }
  return sums;
}

SavedTensor tensor_from_json(const json& value, const std::string& where) {
  const JsonObject fields(value, where, {"dtype", "shape", "kind", "slices"}, {"aliases"});
  SavedTensor tensor;
  const auto dtype = dtype_of(fields.text("dtype"));
  if (!dtype) fields.refuse("the dtype '" + fields.text("dtype") + "' is not known");
  tensor.dtype = *dtype;
  tensor.shape = fields.numbers("shape");
  const auto* kind = std::find(std::begin(kKinds), std::end(kKinds), fields.text("kind"));
  if (kind == std::end(kKinds)) fields.refuse("the kind '" + fields.text("kind") + "' is not known");
  tensor.kind = static_cast<TensorKind>(kind - std::begin(kKinds));
  if (fields.has("aliases")) {
    for (const auto& alias : fields.array("aliases")) {
      if (!alias.is_string()) fields.refuse("an alias is not a text");
      tensor.aliases.push_back(alias.get<std::string>());
    }
  }
  for (const auto& entry : fields.array("slices")) {
    const JsonObject slice(entry, where + ": a slice", {"file", "begin", "offsets", "shape", "checksums"});
    SavedSlice saved;
    const int64_t file = slice.number("file");
    if (file > kMaxWorld) slice.refuse("'file' is out of range");
    saved.file = static_cast<int>(file);
    saved.begin = slice.number("begin");
    saved.box = {slice.numbers("offsets"), slice.numbers("shape")};
    saved.checksums = checksums_from_hex(slice);
    tensor.slices.push_back(std::move(saved));
  }
  return tensor;
}

OptionList options_from_json(const json& value, const std::string& where) {
  if (!value.is_object()) throw CheckpointError(where + ": 'options' is not an object");
  OptionList options;
  for (const auto& [name, option] : value.items()) {
    if (option.is_boolean()) {
      options.emplace_back(name, option.get<bool>());
    } else if (option.is_number()) {
      options.emplace_back(name, option.get<double>());
    } else {
      throw CheckpointError(where + ": the option '" + name + "' is neither a number nor true or false");
    }
  }
  return options;
}

// One line; lists of files, tensors and ranks a line an entry.
std::string in_lines(const json& value, std::string_view field) {
  if ((field != "files" && field != "tensors" && field != "rng") || value.empty()) return value.dump();
  std::string text(value.is_array() ? "[" : "{");
  for (const auto& [key, entry] : value.items()) {
    text += text.size() > 1 ? ",\n " : "\n ";
    if (value.is_object()) text += json(key).dump() + ": ";
    text += entry.dump();
  }
  return text + (value.is_array() ? "]" : "}");
}

std::string sum_of(json manifest) {
  manifest.erase("checksum");
  try {
    return to_hex(checksum(manifest.dump()));
  } catch (const json::exception&) {
    return "";  // text that is not UTF-8: no checksum is that
  }
}

}  // namespace

bool is_block_bytes(int64_t bytes) { return bytes >= 16 && bytes <= (int64_t{1} << 30) && bytes % 16 == 0; }

json files_to_json(const SavedTensors& saved) {
  json files = json::array();
  for (const auto& file : saved.files)
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"header_bytes", file.header_bytes},
                     {"header_checksum", to_hex(file.header_checksum)}});
  return files;
}

json tensors_to_json(const SavedTensors& saved) {
  json tensors = json::object();
  for (const auto& [name, tensor] : saved.tensors) {
    json slices = json::array();
    for (const auto& slice : tensor.slices)
      slices.push_back({{"file", slice.file},
                        {"begin", slice.begin},
                        {"offsets", slice.box.offsets},
                        {"shape", slice.box.sizes},
                        {"checksums", checksums_to_hex(slice.checksums)}});
    json& entry = tensors[name];
    entry = {{"dtype", safetensors_name(tensor.dtype).value()},
             {"shape", tensor.shape},
             {"kind", kKinds[static_cast<int>(tensor.kind)]},
             {"slices", std::move(slices)}};
    if (!tensor.aliases.empty()) entry["aliases"] = tensor.aliases;
  }
  return tensors;
}

void files_from_json(const json& value, const std::string& where, SavedTensors& saved) {
  if (!value.is_array()) throw CheckpointError(where + ": 'files' is not a list");
  std::set<std::string> names;
  for (const auto& entry : value) {
    const JsonObject fields(entry, where + ": a file", {"name", "bytes", "header_bytes", "header_checksum"});
    SavedFile file{fields.text("name"), fields.number("bytes"), fields.number("header_bytes"),
                   fields.hex("header_checksum")};
    if (!is_plain_file_name(file.name)) fields.refuse("the file name '" + file.name + "' is not allowed");
    if (file.header_bytes > file.bytes) fields.refuse("the header of " + file.name + " is larger than the file");
    if (!names.insert(file.name).second) fields.refuse("the file " + file.name + " is listed twice");
    saved.files.push_back(std::move(file));
  }
}

void tensors_from_json(const json& value, const std::string& where, SavedTensors& saved) {
  if (!value.is_object()) throw CheckpointError(where + ": 'tensors' is not an object");
  for (const auto& [name, entry] : value.items()) {
    check_tensor_name(name, where);
    saved.tensors[name] = tensor_from_json(entry, where + ": tensor '" + name + "'");
  }
  std::map<std::string, std::string> owners;
  for (const auto& [name, tensor] : saved.tensors)
    for (const auto& alias : tensor.aliases) {
      check_tensor_name(alias, where);
      if (saved.tensors.contains(alias) || !owners.emplace(alias, name).second)
        throw CheckpointError(where + ": tensor '" + name + "': its alias '" + alias +
                              "' is another tensor's name too");
    }
}

json optimizer_to_json(const SavedOptimizer& optimizer) {
  json groups = json::array();
  for (const auto& group : optimizer.groups) {
    json options = json::object();
    for (const auto& [name, option] : group.options)
      std::visit([&, key = name](auto number) { options[key] = number; }, option);
    groups.push_back({{"options", std::move(options)}, {"parameters", group.parameters}});
  }
  json numbers = json::object();
  for (const auto& [name, values] : optimizer.numbers)
    for (const auto& [key, number] : values) numbers[name][key] = number;
  return {{"kind", optimizer.kind}, {"groups", std::move(groups)}, {"numbers", std::move(numbers)}};
}

SavedOptimizer optimizer_from_json(const json& value, const std::string& where) {
  const JsonObject fields(value, where + ": 'optimizer'", {"kind", "groups", "numbers"});
  SavedOptimizer optimizer{.kind = fields.text("kind")};
  for (const auto& entry : fields.array("groups")) {
    const JsonObject group(entry, where + ": an optimizer's group", {"options", "parameters"});
    SavedGroup saved{options_from_json(group.at("options"), where), {}};
    for (const auto& name : group.array("parameters")) {
      if (!name.is_string()) group.refuse("a parameter's name is not a text");
      saved.parameters.push_back(name.get<std::string>());
    }
    optimizer.groups.push_back(std::move(saved));
  }
  for (const auto& [name, entry] : fields.object("numbers").items()) {
    if (!entry.is_object()) fields.refuse("'numbers' of '" + name + "' is not an object");
    for (const auto& [key, number] : entry.items()) {
      if (!number.is_number_integer()) fields.refuse("the number '" + key + "' of '" + name + "' is not an integer");
      optimizer.numbers[name].emplace_back(key, number.get<int64_t>());
    }
  }
  return optimizer;
}

std::string format_manifest(const Manifest& manifest) {
  json rng = json::array();
  for (const auto& states : manifest.rng) {
    json entry = json::object();
    for (const auto& [device, bytes] : states) entry[device] = bytes_to_hex(bytes);
    rng.push_back(std::move(entry));
  }
  json fields = {{"format", "tessera-checkpoint"},
                 {"version", kFormatVersion},
                 {"sequence", manifest.sequence},
                 {"id", to_hex(manifest.id)},
                 {"world_size", manifest.world_size},
                 {"extra", manifest.extra},
                 {"block_bytes", manifest.saved.block_bytes},
                 {"optimizer", manifest.optimizer ? optimizer_to_json(*manifest.optimizer) : json()},
                 {"files", files_to_json(manifest.saved)},
                 {"tensors", tensors_to_json(manifest.saved)},
                 {"rng", std::move(rng)}};
  fields["checksum"] = sum_of(fields);
  // What a person looks for first comes first, and a line holds a file or a tensor.
  std::string text = "{";
  for (const char* name : {"format", "version", "sequence", "id", "world_size", "checksum", "block_bytes", "extra",
                           "optimizer", "files", "tensors", "rng"}) {
    if (text.size() > 1) text += ',';
    text.append("\n\"").append(name).append("\": ").append(in_lines(fields.at(name), name));
  }
  return text + "\n}\n";
}

Manifest parse_manifest(std::string_view text, const std::string& where) {
  const json parsed = parse_json(text, where);
  const JsonObject fields(parsed, where,
                          {"format", "version", "sequence", "id", "world_size", "block_bytes", "files", "tensors",
                           "optimizer", "rng", "extra", "checksum"});
  if (fields.text("format") != "tessera-checkpoint") fields.refuse("'format' is not tessera-checkpoint");
  if (fields.number("version") != kFormatVersion)
    fields.refuse("has format version " + std::to_string(fields.number("version")) + "; this Tessera reads version " +
                  std::to_string(kFormatVersion));
  if (fields.text("checksum") != sum_of(parsed)) fields.refuse("its checksum does not match: the manifest is damaged");
  Manifest manifest;
  manifest.sequence = fields.number("sequence");
  manifest.id = fields.hex("id");
  const int64_t world = fields.number("world_size");
  if (world < 1 || world > kMaxWorld) fields.refuse("'world_size' is out of range");
  manifest.world_size = static_cast<int>(world);
  manifest.saved.block_bytes = fields.number("block_bytes");
  if (!is_block_bytes(manifest.saved.block_bytes)) fields.refuse("'block_bytes' is not a multiple of 16 up to 1 GiB");
  files_from_json(fields.at("files"), where, manifest.saved);
  tensors_from_json(fields.at("tensors"), where, manifest.saved);
  check_saved_tensors(manifest.saved, where);
  if (!fields.at("optimizer").is_null()) manifest.optimizer = optimizer_from_json(fields.at("optimizer"), where);
  for (const auto& entry : fields.array("rng")) {
    if (!entry.is_object()) fields.refuse("'rng' has an entry that is not an object");
    auto& states = manifest.rng.emplace_back();
    for (const auto& [device, bytes] : entry.items()) {
      try {
        states[device] = bytes_from_hex(bytes.get<std::string>());
      } catch (const std::exception&) {
        fields.refuse("'rng' has an entry that is not hex digits");
      }
    }
  }
  manifest.extra = fields.at("extra");
  return manifest;
}

Manifest read_manifest(const std::filesystem::path& directory) {
  const auto path = directory / kManifestName;
  Manifest manifest = parse_manifest(read_text(path, kMaxManifestBytes), path.string());
  manifest.saved.directory = directory;
  return manifest;
}

std::optional<int64_t> peek_sequence(const std::filesystem::path& directory) {
  // format_manifest() writes these lines first.
  std::ifstream file(directory / kManifestName);
  std::string line;
  bool is_manifest = false;
  for (int i = 0; i < 8 && std::getline(file, line) && line.size() < 256; ++i) {
    is_manifest = is_manifest || line.find("\"format\": \"tessera-checkpoint\"") != std::string::npos;
    const auto found = line.find("\"sequence\": ");
    if (found == std::string::npos || !is_manifest) continue;
    try {
      return std::stoll(line.substr(found + 12));
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace tessera
