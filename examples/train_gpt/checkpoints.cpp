#include "checkpoints.h"

#include <cstdio>

#include "checkpoint/format/checksum.h"
#include "optimizer.h"

namespace train_gpt {
namespace {

std::filesystem::path folder_of(const TrainOptions& options) { return options.out / "checkpoints"; }

std::string name_of_step(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(step));
  return name;
}

}  // namespace

Checkpoints::Checkpoints(const TrainOptions& options, const Corpus& corpus, int64_t windows,
                         tessera::Communicator& comm, Trainable& model)
    : options_(options),
      windows_(windows),
      data_(tessera::internal::to_hex(tessera::internal::checksum(
          corpus.tokens.data(), static_cast<int64_t>(corpus.tokens.size() * sizeof(uint16_t))))),
      warmup_(options.warmup_steps()),
      comm_(comm),
      model_(model) {}

// `run` has to be the same for step n to see the same sequences in the same model; `settings` may be changed.
nlohmann::json Checkpoints::description() const {
  const auto& model = options_.model;
  return {{"run",
           {{"seed", options_.seed},
            {"sequences_per_step", comm_.size() * options_.batch * options_.accumulate},
            {"context", model.context},
            {"windows", windows_},
            {"data", data_},
            {"heads", model.heads},
            {"norm_epsilon", model.norm_epsilon},
            {"scale_attention", model.scale_attention},
            {"scale_attention_by_layer", model.scale_attention_by_layer}}},
          {"settings",
           {{"lr", options_.lr},
            {"warmup", warmup_},
            {"weight-decay", options_.weight_decay},
            {"clip", options_.clip},
            {"ema", options_.ema},
            {"steps", options_.steps}}}};
}

Checkpoints::Resumed Checkpoints::compare(const std::string& path, const nlohmann::json& extra) const {
  if (!extra.contains("run") || !extra.contains("settings") || !extra.contains("step"))
    throw OptionsError("--resume: " + path + " is not of a run of train_gpt, or of an older one");
  Resumed resumed{.step = extra["step"].get<int64_t>(), .warmup = extra["settings"].value("warmup", int64_t{0})};
  const auto own = description();
  for (const auto& [name, value] : own["run"].items())
    if (const auto saved = extra["run"].value(name, nlohmann::json()); saved != value)
      throw OptionsError("--resume: " + path + " is of a run with " + name + " " + saved.dump() + ", this has " +
                         value.dump() +
                         " (sequences_per_step is ranks * batch * accumulate, data a checksum of the text)");
  for (const auto& [name, value] : own["settings"].items()) {
    // Runs from before there were averages had none.
    const auto saved = extra["settings"].value(name, name == "ema" ? nlohmann::json(0.0) : nlohmann::json());
    if (saved == value || (name == "warmup" && !options_.warmup)) continue;
    const std::string change = name + " is " + value.dump() + ", was " + saved.dump();
    if (name != "steps" && !options_.allow_changes)
      throw OptionsError("--resume: " + path + ": " + change + "; --allow-changes goes on with the new one");
    resumed.notes.push_back(change + (name == "steps" ? ": the learning rate follows that length from here on" : ""));
  }
  if (options_.warmup) resumed.warmup = *options_.warmup;
  if (options_.steps < resumed.step)
    throw OptionsError("--resume: " + path + " has done " + std::to_string(resumed.step) + " steps; --steps is " +
                       std::to_string(options_.steps));
  if (options_.steps < resumed.warmup)
    throw OptionsError("--resume: " + path + " has a warm-up of " + std::to_string(resumed.warmup) +
                       " steps; --steps is " + std::to_string(options_.steps) +
                       ": a shorter one is --warmup with --allow-changes");
  return resumed;
}

Checkpoints::Resumed Checkpoints::resume() {
  Resumed resumed{.warmup = warmup_};
  if (options_.resume.empty()) return resumed;
  const auto decays = weight_decays(model_.optimizer());  // as --weight-decay says; loading sets the saved ones
  if (options_.resume == "auto") {
    auto loaded = tessera::load_newest_checkpoint(folder_of(options_), model_.shards(), model_.optimizer());
    if (!loaded) return resumed;
    resumed = compare(loaded->path.string(), loaded->extra);
    for (const auto& error : loaded->damaged) resumed.notes.push_back("passed over: " + error);
    if (!loaded->damaged.empty()) resumed.notes.push_back("goes on from " + loaded->path.string());
  } else {
    resumed = compare(options_.resume, tessera::load_checkpoint(options_.resume, model_.shards(), model_.optimizer()));
  }
  warmup_ = resumed.warmup;
  set_weight_decays(model_.optimizer(), decays);
  return resumed;
}

void Checkpoints::before_update() {
  if (pending_) pending_->copied();
}

void Checkpoints::after_step(int64_t step) {
  if (options_.save_every == 0 || (step % options_.save_every != 0 && step != options_.steps)) return;
  nlohmann::json extra = description();
  extra["step"] = step;
  pending_ =
      tessera::save_checkpoint_async(folder_of(options_) / name_of_step(step), model_.shards(), model_.optimizer(),
                                     extra, {.keep_last = static_cast<int>(options_.keep), .copy_in_background = true});
}

void Checkpoints::finish() {
  if (pending_) pending_->wait();
}

}  // namespace train_gpt
