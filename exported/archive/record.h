#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exported/archive/archive.h"

namespace tessera::internal {

// The mode in which a model was exported, and its differences from the other mode, found by tools/export_model.py.
struct ExportedModes {
  bool training = true;
  std::set<std::string> always;              // modules whose dropout is equal in both modes
  std::map<std::string, bool> pinned;        // modules that the model's train() keeps in one mode; true: training
  std::map<std::string, std::string> fixed;  // modules ("": the root) that cannot be switched, with the reason
};

// Facts about a model that tools/export_model.py stores (extra/tessera.json) and torch.export does not. Archives of
// other tools have no such facts. Older archives have some of them.
struct ExportRecord {
  // Groups of names; each group names one tensor. nullopt if unknown.
  std::optional<std::vector<std::vector<std::string>>> ties;
  // Inputs that Python's forward() takes by position, in order.
  std::vector<std::string> positional;
  // Whether tools/export_model.py compared the gradients of the decomposed program with those of the model.
  bool has_checked_gradients = false;

  std::optional<ExportedModes> modes;

  // Returns the facts in an archive; without extra/tessera.json, the defaults. Throws ExportedError if it is damaged.
  static ExportRecord read(const Archive& archive);
};

}  // namespace tessera::internal
