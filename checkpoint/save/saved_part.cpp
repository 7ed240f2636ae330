#include "checkpoint/save/saved_part.h"

#include <utility>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {
namespace {

using nlohmann::json;

// Returns a hash of the optimizers without their numbers. Ranks compare hashes, because lists of all names are long.
std::string fingerprint(SavedOptimizers optimizers) {
  for (auto& [name, optimizer] : optimizers) optimizer.numbers.clear();
  return to_hex(checksum(optimizers_to_json(optimizers).dump()));
}

}  // namespace

SavedPart::SavedPart(int64_t world_size) { saved_ = {.by_rank = true, .world_size = world_size}; }

void SavedPart::set(SavedTensors saved, const SavedOptimizers& optimizers) {
  Numbers numbers;  // names are unique, because each parameter is in only one optimizer
  for (const auto& [name, optimizer] : optimizers) numbers.insert(optimizer.numbers.begin(), optimizer.numbers.end());
  add(std::move(saved), optimizers.empty() ? std::nullopt : std::optional(fingerprint(optimizers)), numbers,
      "this rank");
}

void SavedPart::add(const std::string& text, const std::string& who) {
  const std::string where = "what " + who + " wrote";
  const json parsed = parse_json(text, where);
  const JsonObject part(parsed, where, {"tensors", "optimizer", "numbers"});
  SavedTensors saved{.by_rank = true, .world_size = saved_.world_size};
  tensors_from_json(part.at("tensors"), where, saved);
  std::optional<std::string> optimizer;
  if (!part.at("optimizer").is_null()) optimizer = part.text("optimizer");
  add(std::move(saved), optimizer, part.at("numbers").get<Numbers>(), who);
}

void SavedPart::add(SavedTensors saved, const std::optional<std::string>& optimizer, const Numbers& numbers,
                    const std::string& who) {
  if (!std::exchange(has_any_, true)) optimizer_ = optimizer;
  if (optimizer != optimizer_)
    throw CheckpointError("the optimizer of " + who + " differs from rank 0's in its groups or options");
  append(saved_, std::move(saved));
  for (const auto& [name, own] : numbers)
    for (const auto& [key, number] : own) {
      const auto known = numbers_[name].try_emplace(key, number).first;
      if (known->second != number)
        throw CheckpointError("ranks differ in '" + key + "' of '" + name + "': " + who + " has " +
                              std::to_string(number) + ", one before " + std::to_string(known->second));
    }
}

std::string SavedPart::text() const {
  SavedTensors saved = saved_;
  join_all(saved);
  return json{{"tensors", tensors_to_json(saved)},
              {"optimizer", optimizer_ ? json(*optimizer_) : json()},
              {"numbers", numbers_}}
      .dump();
}

Manifest SavedPart::manifest(SavedOptimizers optimizers) && {
  join_all(saved_);
  Manifest manifest{.world_size = static_cast<int>(saved_.world_size),
                    .saved = std::move(saved_),
                    .optimizers = std::move(optimizers)};
  for (auto& [name, optimizer] : manifest.optimizers) {
    optimizer.numbers.clear();
    for (const auto& group : optimizer.groups)
      for (const auto& parameter : group.parameters)
        if (const auto found = numbers_.find(parameter); found != numbers_.end()) optimizer.numbers.insert(*found);
  }
  return manifest;
}

}  // namespace tessera::internal
