#pragma once

#include <map>
#include <string>
#include <vector>

#include <tessera/exported/value.h>

namespace tessera::internal {

// The nesting of Python's inputs or outputs (a torch.utils._pytree.TreeSpec): sequences and dictionaries of leaves.
class Structure {
 public:
  // Element names of named tuples, by the type's serialized name. A TreeSpec does not contain them.
  using FieldNames = std::map<std::string, std::vector<std::string>>;

  // Parses the output of treespec_dumps(), version 1. Throws ExportedError.
  static Structure parse(const std::string& treespec, const FieldNames& named_tuples = {});

  bool is_leaf() const { return kind_ == Kind::kLeaf; }
  bool is_dict() const { return kind_ == Kind::kDict; }
  const std::vector<Structure>& children() const { return children_; }
  const std::vector<std::string>& names() const { return names_; }  // names of a dict's children
  size_t leaf_count() const;

  // Appends the leaves of a value of this structure, in the structure's order. Accepts a dict in any order, or as a
  // sequence. If the structure differs, throws std::invalid_argument that starts with `where`.
  void flatten(const ExportedValue& value, const std::string& where, std::vector<ExportedValue>& leaves) const;
  // Appends the names that flatten() uses for the leaves.
  void name_leaves(const std::string& where, std::vector<std::string>& names) const;
  // Returns the value with these leaves.
  ExportedValue unflatten(const std::vector<ExportedValue>& leaves) const;

 private:
  enum class Kind : uint8_t { kLeaf, kSequence, kDict };
  ExportedValue unflatten(const std::vector<ExportedValue>& leaves, size_t& next) const;
  friend class StructureReader;

  Kind kind_ = Kind::kLeaf;
  std::vector<std::string> names_;
  std::vector<Structure> children_;
};

}  // namespace tessera::internal
