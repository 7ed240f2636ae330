#include "checkpoint/format/manifest.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/safetensors_header.h"

namespace tessera::internal {
namespace {

using nlohmann::json;

constexpr const char* kKinds[] = {"parameter", "buffer", "state", "beside"};
constexpr int64_t kMaxWorld = 10'000'000;

// Accepts only letters, digits, '.', '_' and '-', and no leading dot. So the name cannot refer to another directory.
bool is_plain_file_name(const std::string& name) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name.size() < 256 && name[0] != '.' && name.find_first_not_of(kPlain) == std::string::npos;
}

SavedSlice slice_from_json(const json& entry, const std::string& where) {
  const JsonObject slice(entry, where + ": a slice", {"file", "begin", "offsets", "shape", "checksums"});
  return {static_cast<int>(slice.number("file", 0, kMaxWorld)),
          slice.number("begin"),
          {slice.numbers("offsets"), slice.numbers("shape")},
          checksums_from_hex(slice.text("checksums"), slice.where())};
}

// Parses a RankRun from the JSON array [rank, rank_step, count, begin, numel].
RankRun run_from_json(const json& entry, const JsonObject& tensor) {
  const bool fits = entry.is_array() && entry.size() == 5 && std::all_of(entry.begin(), entry.end(), is_count);
  if (!fits) tensor.refuse("a run of ranks is not five numbers");
  return {entry[0], entry[1], entry[2], entry[3], entry[4]};
}

SavedTensor tensor_from_json(const json& value, const std::string& where, bool by_rank) {
  const JsonObject fields(value, where, {"dtype", "shape", "kind", by_rank ? "runs" : "slices"},
                          {"aliases", by_rank ? "order" : "aliases"});
  const auto* kind = std::ranges::find(kKinds, fields.text("kind"));
  if (kind == std::end(kKinds)) fields.refuse("the kind '" + fields.text("kind") + "' is not known");
  SavedTensor tensor{.dtype = dtype_field(fields),
                     .shape = fields.numbers("shape"),
                     .kind = static_cast<TensorKind>(kind - std::begin(kKinds))};
  if (fields.has("aliases")) tensor.aliases = fields.texts("aliases");
  if (by_rank) {
    if (fields.has("order")) tensor.order = fields.numbers("order");
    for (const auto& entry : fields.array("runs")) tensor.runs.push_back(run_from_json(entry, fields));
  } else {
    for (const auto& entry : fields.array("slices")) tensor.slices.push_back(slice_from_json(entry, where));
  }
  return tensor;
}

OptionList options_from_json(const JsonObject& group) {
  OptionList options;
  for (const auto& [name, option] : group.object("options").items()) {
    if (!option.is_boolean() && !option.is_number())
      group.refuse("the option '" + name + "' is neither a number nor true or false");
    options.emplace_back(name, option.is_boolean() ? OptimizerOption(option.get<bool>()) : option.get<double>());
    if (const std::string reason = why_not_an_option(name, options.back().second); !reason.empty())
      group.refuse("the option '" + name + "' " + reason);
  }
  return options;
}

SavedOptimizer optimizer_from_json(const json& value, const std::string& where, const std::string& whose) {
  const JsonObject fields(value, where + ": " + whose, {"kind", "groups", "numbers"});
  SavedOptimizer optimizer{.kind = fields.text("kind")};
  for (const auto& entry : fields.array("groups")) {
    const JsonObject group(entry, where + ": an optimizer's group", {"options", "parameters"});
    optimizer.groups.push_back({options_from_json(group), group.texts("parameters")});
  }
  for (const auto& [name, entry] : fields.object("numbers").items()) {
    if (!entry.is_object()) fields.refuse("'numbers' of '" + name + "' is not an object");
    for (const auto& [key, number] : entry.items()) {
      const bool is_bits = key.ends_with("_bits") && number.is_number_integer();  // the bits of a double as an int64_t
      if (!is_bits && !is_count(number))
        fields.refuse("the number '" + key + "' of '" + name + "' is not a count: " + number.dump());
      optimizer.numbers[name][key] = number.get<int64_t>();
    }
  }
  return optimizer;
}

json beside_to_json(const std::map<std::string, StateValues>& beside) {
  json all = json::object();
  for (const auto& [name, values] : beside) {
    json& entry = all[name] = json::object();
    for (const auto& [key, value] : values)
      std::visit([&, field = key](const auto& own) { entry[field] = own; }, value);
  }
  return all;
}

std::map<std::string, StateValues> beside_from_json(const JsonObject& fields) {
  std::map<std::string, StateValues> all;
  for (const auto& [name, entry] : fields.object("beside").items()) {
    if (!entry.is_object()) fields.refuse("'beside' has a '" + name + "' that is not an object");
    StateValues& values = all[name];
    for (const auto& [key, value] : entry.items()) {
      if (value.is_boolean())
        values[key] = value.get<bool>();
      else if (value.is_number_integer())
        values[key] = value.get<int64_t>();
      else if (value.is_number_float())
        values[key] = value.get<double>();
      else if (value.is_string())
        values[key] = value.get<std::string>();
      else
        fields.refuse("'beside': '" + name + "' has a '" + key + "' that is neither a number nor a text");
    }
  }
  return all;
}

void files_from_json(const JsonObject& fields, SavedTensors& saved) {
  std::set<std::string> files;
  for (const auto& entry : fields.array("files")) {
    const JsonObject file(entry, fields.where() + ": a file", {"name", "bytes", "header_bytes", "header_checksum"});
    const std::string name = file.text("name");
    if (!is_plain_file_name(name)) file.refuse("the file name '" + name + "' is not allowed");
    if (file.number("header_bytes") > file.number("bytes"))
      file.refuse("the header of " + name + " is larger than the file");
    if (!files.insert(name).second) file.refuse("the file " + name + " is listed twice");
    saved.files.push_back({name, file.number("bytes"), file.number("header_bytes"), file.hex("header_checksum")});
  }
}

// Formats an object with one line for each entry.
std::string in_lines(const json& object) {
  std::string text = "{";
  for (const auto& [key, entry] : object.items())
    text.append(text.size() > 1 ? ",\n " : "\n ").append(json(key).dump()).append(": ").append(entry.dump());
  return text + "}";
}

// Removes the field "checksum", and returns the checksum of all other fields.
std::string take_sum(json& manifest) {
  manifest.erase("checksum");
  try {
    return to_hex(checksum(manifest.dump()));
  } catch (const json::exception&) {
    return "";  // the text is not UTF-8; "" matches no checksum
  }
}

}  // namespace

std::string checksums_to_hex(const std::vector<uint64_t>& checksums) {
  std::string text;
  for (const uint64_t sum : checksums) text += to_hex(sum);
  return text;
}

std::vector<uint64_t> checksums_from_hex(const std::string& text, const std::string& where) {
  std::vector<uint64_t> sums;
  try {
    for (size_t i = 0; i < text.size(); i += 16) sums.push_back(from_hex(std::string_view(text).substr(i, 16)));
  } catch (const std::invalid_argument& error) {
    throw CheckpointError(where + ": 'checksums', of each block: " + error.what());
  }
  return sums;
}

std::string why_not_an_option(const std::string& name, const OptimizerOption& option) {
  constexpr const char* kNotNegative[] = {"lr", "eps", "weight_decay", "momentum", "beta1", "beta2"};
  const double* number = std::get_if<double>(&option);
  if (number == nullptr) return "";
  if (!std::isfinite(*number)) return "is not finite";
  const bool may_be_negative = std::ranges::find(kNotNegative, name) == std::end(kNotNegative);
  return *number < 0 && !may_be_negative ? "is negative: " + std::to_string(*number) : "";
}

bool is_block_bytes(int64_t bytes) { return bytes >= 16 && bytes <= (int64_t{1} << 30) && bytes % 16 == 0; }

json tensors_to_json(const SavedTensors& saved) {
  json tensors = json::object();
  for (const auto& [name, tensor] : saved.tensors) {
    json& entry = tensors[name];
    entry = {{"dtype", safetensors_name(tensor.dtype).value()},
             {"shape", tensor.shape},
             {"kind", kKinds[static_cast<int>(tensor.kind)]}};
    if (!tensor.aliases.empty()) entry["aliases"] = tensor.aliases;
    json& runs = entry["runs"] = json::array();
    for (const auto& run : tensor.runs) runs.push_back({run.rank, run.rank_step, run.count, run.begin, run.numel});
    if (!tensor.order.empty()) entry["order"] = tensor.order;
  }
  return tensors;
}

void tensors_from_json(const json& tensors, const std::string& where, SavedTensors& saved) {
  if (!tensors.is_object()) throw CheckpointError(where + ": 'tensors' is not an object");
  std::set<std::string> aliases;
  for (const auto& [name, entry] : tensors.items()) {
    check_tensor_name(name, where);
    saved.tensors[name] = tensor_from_json(entry, where + ": tensor '" + name + "'", saved.by_rank);
  }
  for (const auto& [name, tensor] : saved.tensors)
    for (const auto& alias : tensor.aliases) {
      check_tensor_name(alias, where);
      if (saved.tensors.contains(alias) || !aliases.insert(alias).second)
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
  return {{"kind", optimizer.kind}, {"groups", std::move(groups)}, {"numbers", optimizer.numbers}};
}

json optimizers_to_json(const SavedOptimizers& optimizers) {
  if (optimizers.empty()) return json();
  if (optimizers.begin()->first.empty()) return optimizer_to_json(optimizers.begin()->second);
  json all = json::object();
  for (const auto& [name, optimizer] : optimizers) all[name] = optimizer_to_json(optimizer);
  return all;
}

json generators_to_json(const GeneratorStates& states) {
  json entry = json::object();
  for (const auto& [device, bytes] : states) entry[device] = bytes_to_hex(bytes);
  return entry;
}

GeneratorStates generators_from_json(const json& value, const std::string& where) {
  if (!value.is_object()) throw CheckpointError(where + ": 'rng' has an entry that is not an object");
  GeneratorStates states;
  try {
    for (const auto& [device, bytes] : value.items()) states[device] = bytes_from_hex(bytes.get<std::string>());
  } catch (const std::bad_alloc&) {  // lack of memory does not mean that the file is damaged
    throw;
  } catch (const std::exception&) {
    throw CheckpointError(where + ": 'rng' has an entry that is not hex digits");
  }
  return states;
}

std::string format_manifest(const Manifest& manifest) {
  json fields{{"format", "tessera-checkpoint"},
              {"version", kFormatVersion},
              {"sequence", manifest.sequence},
              {"id", to_hex(manifest.id)},
              {"world_size", manifest.world_size},
              {"extra", manifest.extra},
              {"block_bytes", manifest.saved.block_bytes},
              {"optimizer", json()},
              {"tensors", tensors_to_json(manifest.saved)},
              {"rng", manifest.saved.has_rng}};
  const bool are_named = !manifest.optimizers.empty() && !manifest.optimizers.begin()->first.empty();
  fields[are_named ? "optimizers" : "optimizer"] = optimizers_to_json(manifest.optimizers);
  if (!manifest.models.empty()) fields["models"] = manifest.models;
  if (!manifest.beside.empty()) fields["beside"] = beside_to_json(manifest.beside);
  if (!manifest.folder.empty()) fields["folder"] = manifest.folder;
  fields["checksum"] = take_sum(fields);
  // Most short fields precede "tensors", which has one line for each tensor. So people find the short fields easily.
  std::string text = "{";
  for (const std::string name :
       {"format", "version", "sequence", "id", "folder", "world_size", "checksum", "block_bytes", "extra", "beside",
        "models", "optimizer", "optimizers", "tensors", "rng"}) {
    if (!fields.contains(name)) continue;
    if (text.size() > 1) text += ',';
    text += "\n\"" + name + "\": " + (name == "tensors" ? in_lines(fields[name]) : fields[name].dump());
  }
  return text + "\n}\n";
}

std::optional<int64_t> sequence_of(std::string_view text) try {
  json parsed = parse_json(text, "");
  auto number = [&](const char* field) {
    const auto found = parsed.find(field);
    return found != parsed.end() && found->is_number_unsigned() ? found->get<int64_t>() : -1;
  };
  const int64_t sequence = number("sequence");
  const bool is_manifest = parsed.is_object() && parsed.value("format", json()) == "tessera-checkpoint";
  if (!is_manifest || sequence < 0 || sequence > JsonObject::kMost) return std::nullopt;
  if (number("version") > kFormatVersion) return sequence;
  const json expected = parsed.value("checksum", json());
  return expected == take_sum(parsed) ? std::optional(sequence) : std::nullopt;
} catch (const CheckpointError&) {
  return std::nullopt;
}

Manifest parse_manifest(std::string_view text, const std::string& where, bool is_part) {
  json parsed = parse_json(text, where);
  const JsonObject fields(parsed, where,
                          {"format", "version", "sequence", "id", "world_size", "block_bytes", "tensors", "optimizer",
                           "rng", "extra", "checksum"},
                          {"files", "beside", "folder", "models", "optimizers"});
  if (fields.text("format") != "tessera-checkpoint") fields.refuse("'format' is not tessera-checkpoint");
  if (const int64_t version = fields.number("version"); version < 1 || version > kFormatVersion)
    throw CheckpointMismatch(where + ": has format version " + std::to_string(version) +
                             "; this Tessera reads version 1 to " + std::to_string(kFormatVersion));
  const bool by_rank = fields.number("version") == kFormatVersion;
  if (by_rank == fields.has("files"))
    fields.refuse(std::string("the field 'files' is ") + (by_rank ? "not known" : "missing"));
  for (const char* field : {"beside", "folder", "models", "optimizers"})
    if (!by_rank && fields.has(field)) fields.refuse(std::string("the field '") + field + "' is not known");
  if (const std::string expected = fields.text("checksum"); expected != take_sum(parsed))
    fields.refuse("its checksum does not match: the manifest is damaged");
  if (!is_block_bytes(fields.number("block_bytes"))) fields.refuse("'block_bytes' is not a multiple of 16 up to 1 GiB");
  Manifest manifest{.sequence = fields.number("sequence"),
                    .id = fields.hex("id"),
                    .world_size = static_cast<int>(fields.number("world_size", 1, kMaxWorld)),
                    .extra = fields.at("extra")};
  manifest.saved.block_bytes = fields.number("block_bytes");
  if (by_rank) {
    manifest.saved.by_rank = true;
    manifest.saved.world_size = manifest.world_size;
    manifest.saved.id = manifest.id;
    if (!fields.at("rng").is_boolean()) fields.refuse("'rng' is neither true nor false");
    manifest.saved.has_rng = fields.at("rng").get<bool>();
    if (fields.has("beside")) manifest.beside = beside_from_json(fields);
    if (fields.has("folder")) manifest.folder = fields.text("folder");
    if (fields.has("folder") && !is_plain_file_name(manifest.folder))
      fields.refuse("the folder '" + manifest.folder + "' is not allowed");
  } else {
    files_from_json(fields, manifest.saved);
    for (const auto& entry : fields.array("rng")) manifest.rng.push_back(generators_from_json(entry, where));
  }
  tensors_from_json(fields.object("tensors"), where, manifest.saved);
  if (!is_part) check_saved_tensors(manifest.saved, where);
  if (!fields.at("optimizer").is_null())
    manifest.optimizers.emplace("", optimizer_from_json(fields.at("optimizer"), where, "'optimizer'"));
  if (fields.has("optimizers"))
    for (const auto& [name, entry] : fields.object("optimizers").items()) {
      if (name.empty()) fields.refuse("an optimizer of 'optimizers' has no name");
      manifest.optimizers.emplace(name, optimizer_from_json(entry, where, "the optimizer '" + name + "'"));
    }
  if (manifest.optimizers.size() > 1 && manifest.optimizers.contains(""))
    fields.refuse("it has both 'optimizer' and 'optimizers'");
  if (fields.has("models")) manifest.models = fields.texts("models");
  return manifest;
}

}  // namespace tessera::internal
