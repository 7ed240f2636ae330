#pragma once

#include <map>
#include <string>
#include <vector>

#include <tessera/exported_value.h>

namespace tessera::internal {

// How Python's inputs or outputs are made of leaves (a torch.utils._pytree.TreeSpec): nested sequences and
// dictionaries.
class Structure {
 public:
  // Named tuples have the names of their elements elsewhere: by the type's serialized name.
  using FieldNames = std::map<std::string, std::vector<std::string>>;

  // Reads what treespec_dumps() wrote, version 1. Throws ExportedError.
  static Structure parse(const std::string& treespec, const FieldNames& named_tuples = {});

  bool is_leaf() const { return kind_ == Kind::kLeaf; }
  bool is_dict() const { return kind_ == Kind::kDict; }
  const std::vector<Structure>& children() const { return children_; }
  const std::vector<std::string>& names() const { return names_; }  // of a dict's children
  size_t leaf_count() const;

  // The leaves of a value of this structure, in order; a dict's elements may be in another order. Throws
  // std::invalid_argument, beginning with `where`, for a value of another structure.
  void flatten(const ExportedValue& value, const std::string& where, std::vector<ExportedValue>& leaves) const;
  // What flatten() would call the leaves.
  void name_leaves(const std::string& where, std::vector<std::string>& names) const;
  // The value of leaves.
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
