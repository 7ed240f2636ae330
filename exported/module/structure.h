#pragma once

#include <map>
#include <string>
#include <vector>

#include <tessera/exported/value.h>

namespace tessera::internal {

// The nesting of Python inputs or outputs in sequences and dictionaries (a torch.utils._pytree.TreeSpec).
class Structure {
 public:
  // Maps the serialized type name of a named tuple to the names of its elements, which a TreeSpec does not contain.
  using FieldNames = std::map<std::string, std::vector<std::string>>;

  // Parses the output of PyTorch's treespec_dumps(), version 1. Throws ExportedError on failure.
  static Structure parse(const std::string& treespec, const FieldNames& named_tuples = {});

  bool is_leaf() const { return kind_ == Kind::kLeaf; }
  bool is_dict() const { return kind_ == Kind::kDict; }
  const std::vector<Structure>& children() const { return children_; }
  const std::vector<std::string>& names() const { return names_; }  // names of the children of a dictionary
  size_t leaf_count() const;

  // Appends the leaves of `value` to `leaves`, in the order of this structure. A dictionary in `value` may have its
  // entries in another order, or be replaced by a sequence of its values in this structure's order. If `value` does not
  // fit, throws std::invalid_argument, whose text starts with `where`.
  void flatten(const ExportedValue& value, const std::string& where, std::vector<ExportedValue>& leaves) const;
  // Appends the names of the leaves, as flatten() uses them in error texts.
  void name_leaves(const std::string& where, std::vector<std::string>& names) const;
  // Builds the nested value of this structure from its leaves.
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
