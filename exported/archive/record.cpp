#include "exported/archive/record.h"

#include "exported/archive/fields.h"

namespace tessera::internal {

using nlohmann::json;

ExportRecord ExportRecord::read(const Archive& archive) {
  constexpr const char* kMember = "extra/tessera.json";
  ExportRecord record;
  if (!archive.has(kMember)) return record;
  const json written = parse_archive_json(archive.text(kMember), kMember);
  record.ties.emplace();
  for (const json& names : list_field(written, "ties")) record.ties->push_back(texts_of(names));
  if (written.contains("positional")) record.positional = texts_of(list_field(written, "positional"));
  if (written.contains("gradients")) record.has_checked_gradients = bool_field(written, "gradients");
  if (!written.contains("modes") || written["modes"].is_null()) return record;
  const json& modes = object_field(written, "modes");
  auto& own = record.modes.emplace();
  own.training = bool_field(modes, "training");
  for (std::string& fqn : texts_of(list_field(modes, "always"))) own.always.insert(std::move(fqn));
  const json &pinned = object_field(modes, "pinned"), &fixed = object_field(modes, "fixed");
  for (const auto& [fqn, mode] : pinned.items()) own.pinned[fqn] = bool_field(pinned, fqn.c_str());
  for (const auto& [fqn, why] : fixed.items()) own.fixed[fqn] = text_field(fixed, fqn.c_str());
  return record;
}

}  // namespace tessera::internal
