#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include <tessera/model/model_shards.h>

namespace tessera {

// Values of a state that are no tensors, by name: {"position", 7}. Real ones are finite, texts UTF-8.
using StateValue = std::variant<bool, int64_t, double, std::string>;
using StateValues = std::map<std::string, StateValue>;

// What is saved and loaded beside the model and its optimizer, by the same call: a sampler, a scaler of gradients, a
// schedule, averaged weights. Nothing here is collective.
class Stateful {
 public:
  virtual ~Stateful() = default;
  // What a checkpoint calls it: letters, digits and '_', the same on all ranks, no other's of the training state.
  virtual std::string state_name() const = 0;
  // Rank 0's are saved.
  virtual StateValues state_values() const = 0;
  // Throws std::invalid_argument unless load_state_values() can take these.
  virtual void check_state_values(const StateValues& values) const = 0;
  // Goes on from there. The same values on all ranks, checked before.
  virtual void load_state_values(const StateValues& values) = 0;
  // Its tensors, as a model shows its parameters: the same names on all ranks, this rank's part of each. Loading writes
  // to them. Replicas and shards as of NamedShard.
  virtual std::vector<NamedShard> state_shards() const { return {}; }
};

// For check_state_values(): throws std::invalid_argument, which names them, unless the values are of these names and
// of the types of `expected`'s values.
inline void require_same_form(const StateValues& values, const StateValues& expected, const std::string& whose) {
  constexpr const char* kTypes[] = {"true or false", "an integer", "a number", "a text"};
  for (const auto& [name, value] : expected) {
    const auto found = values.find(name);
    if (found == values.end()) throw std::invalid_argument("the state of " + whose + " has no '" + name + "'");
    if (found->second.index() != value.index())
      throw std::invalid_argument("the state of " + whose + " has a '" + name + "' that is not " +
                                  kTypes[value.index()]);
  }
  for (const auto& [name, value] : values)
    if (!expected.contains(name)) throw std::invalid_argument(whose + " knows no '" + name + "'");
}

}  // namespace tessera
