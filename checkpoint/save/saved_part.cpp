#include "checkpoint/save/saved_part.h"

#include <utility>

#include <tessera/errors.h>
#include "checkpoint/format/checksum.h"
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {
namespace {

using nlohmann::json;

// Detects ranks whose optimizers differ, without sending the names of all parameters.
std::string fingerprint(const SavedOptimizer& optimizer) {
  return to_hex(checksum(optimizer_to_json({optimizer.kind, optimizer.groups}).dump()));
}

}  // namespace

SavedPart::SavedPart(int64_t world_size) { saved_ = {.by_rank = true, .world_size = world_size}; }

void SavedPart::set(SavedTensors saved, const SavedOptimizer* optimizer) {
  add(std::move(saved), optimizer == nullptr ? std::nullopt : std::optional(fingerprint(*optimizer)),
      optimizer == nullptr ? Numbers() : optimizer->numbers, "this rank");
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

Manifest SavedPart::manifest(const std::optional<SavedOptimizer>& optimizer) && {
  join_all(saved_);
  Manifest manifest{
      .world_size = static_cast<int>(saved_.world_size), .saved = std::move(saved_), .optimizer = optimizer};
  if (manifest.optimizer) manifest.optimizer->numbers = std::move(numbers_);
  return manifest;
}

}  // namespace tessera::internal
