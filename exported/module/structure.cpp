#include "exported/module/structure.h"

#include <stdexcept>

#include <tessera/errors.h>
#include "exported/archive/fields.h"

namespace tessera::internal {

using nlohmann::json;

class StructureReader {
 public:
  explicit StructureReader(const Structure::FieldNames& named_tuples) : named_tuples_(named_tuples) {}

  // Parses {"type": "builtins.dict", "context": "[\"logits\"]", "children_spec": [...]}. A leaf has the type null.
  Structure read(const json& spec) const {
    Structure structure;
    const json& children = list_field(spec, "children_spec");
    const json& type = field(spec, "type");
    if (type.is_null()) {
      if (!children.empty()) throw ExportedError("a leaf of a structure has children");
      return structure;
    }
    for (const json& child : children) structure.children_.push_back(read(child));
    structure.kind_ = Structure::Kind::kSequence;
    auto names = names_of(text_of(type), field(spec, "context"));
    if (names.empty() && text_of(type) == "builtins.dict") {
      if (!children.empty()) throw ExportedError("a dict of a structure has children without names");
      structure.kind_ = Structure::Kind::kDict;
    }
    if (names.empty() || names.size() != children.size()) return structure;
    structure.kind_ = Structure::Kind::kDict;
    structure.names_ = std::move(names);
    return structure;
  }

 private:
  // Returns the names of a structure's children from its context, or no names. The context of a dictionary or result
  // class is a list of names. A defaultdict has the names in `dict_context`, and a dataclass in the first of two lists.
  std::vector<std::string> names_of(const std::string& type, const json& context) const {
    const std::string text = context.is_string() ? context.get<std::string>() : "";
    const json parsed = json::accept(text) ? parse_archive_json(text, "the context of a structure") : context;
    const std::string own = parsed.is_string() ? parsed.get<std::string>() : text;
    for (const std::string& name : {own, type})
      if (const auto found = named_tuples_.find(name); found != named_tuples_.end()) return found->second;
    const json* keys = &parsed;
    const bool is_of_builtins = type.starts_with("builtins.") || type.starts_with("collections.");
    if (parsed.is_object() && parsed.contains("dict_context")) keys = &parsed["dict_context"];
    if (!is_of_builtins && parsed.is_array() && parsed.size() == 2 && parsed[0].is_array() && parsed[1].is_array())
      keys = &parsed[0];
    if (!keys->is_array()) return {};
    std::vector<std::string> names;
    for (const json& key : *keys) names.push_back(key.is_string() ? key.get<std::string>() : key.dump());
    return names;
  }

  const Structure::FieldNames& named_tuples_;
};

Structure Structure::parse(const std::string& treespec, const FieldNames& named_tuples) {
  const json parsed = parse_archive_json(treespec, "the structure of inputs or outputs");
  if (!parsed.is_array() || parsed.size() != 2 || parsed[0] != 1)
    throw ExportedError("the structure of inputs or outputs is not of version 1");
  return StructureReader(named_tuples).read(parsed[1]);
}

size_t Structure::leaf_count() const {
  if (is_leaf()) return 1;
  size_t count = 0;
  for (const Structure& child : children_) count += child.leaf_count();
  return count;
}

void Structure::flatten(const ExportedValue& value, const std::string& where,
                        std::vector<ExportedValue>& leaves) const {
  if (is_leaf()) return leaves.push_back(value);
  const bool fits = is_dict() ? value.is_dict() || value.is_sequence() : value.is_sequence();
  if (!fits || value.size() != children_.size())
    throw std::invalid_argument(where + " is " + value.kind() + ", exported as a " + (is_dict() ? "dict" : "sequence") +
                                " of " + std::to_string(children_.size()));
  for (size_t i = 0; i < children_.size(); ++i) {
    if (!value.is_dict()) {
      children_[i].flatten(value[i], where + "[" + std::to_string(i) + "]", leaves);
    } else if (value.has(names_[i])) {
      children_[i].flatten(value[names_[i]], where + "['" + names_[i] + "']", leaves);
    } else {
      throw std::invalid_argument(where + " has no '" + names_[i] + "'");
    }
  }
}

void Structure::name_leaves(const std::string& where, std::vector<std::string>& names) const {
  if (is_leaf()) return names.push_back(where);
  for (size_t i = 0; i < children_.size(); ++i)
    children_[i].name_leaves(where + (is_dict() ? "['" + names_[i] + "']" : "[" + std::to_string(i) + "]"), names);
}

ExportedValue Structure::unflatten(const std::vector<ExportedValue>& leaves) const {
  size_t next = 0;
  return unflatten(leaves, next);
}

ExportedValue Structure::unflatten(const std::vector<ExportedValue>& leaves, size_t& next) const {
  if (is_leaf()) return leaves.at(next++);
  if (is_dict()) {
    ExportedValue::Named named;
    for (size_t i = 0; i < children_.size(); ++i) named.emplace_back(names_[i], children_[i].unflatten(leaves, next));
    return ExportedValue::dict(std::move(named));
  }
  std::vector<ExportedValue> elements;
  for (const Structure& child : children_) elements.push_back(child.unflatten(leaves, next));
  return elements;
}

}  // namespace tessera::internal
