#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exported/archive/archive.h"

namespace tessera::internal {

// A model was exported in train() or eval(), and the other mode was compared with Python's.
struct ExportedModes {
  bool training = true;
  std::set<std::string> always;              // modules whose dropout is the same in both modes
  std::map<std::string, bool> pinned;        // modules that Python's train() leaves in one mode: is it train()?
  std::map<std::string, std::string> fixed;  // modules ("": all of it) that cannot be switched, and why
};

// What tools/export_model.py has found out about a model and torch.export does not write down (extra/tessera.json).
// Archives of others, and of earlier versions of the tool, have nothing of it, or less.
struct ExportRecord {
  // Names of one tensor; nothing if nobody has looked.
  std::optional<std::vector<std::vector<std::string>>> ties;
  // Inputs that Python's forward() takes by position, in its order.
  std::vector<std::string> positional;
  // Gradients of the decomposed program were compared with the model's.
  bool has_checked_gradients = false;

  std::optional<ExportedModes> modes;

  // Throws ExportedError.
  static ExportRecord read(const Archive& archive);
};

}  // namespace tessera::internal
