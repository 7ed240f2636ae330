#include <tessera/plan/training_choice.h>

#include <utility>

namespace tessera {
using namespace internal;

std::vector<TrainingChoice> training_choices() {
  std::vector<TrainingChoice> choices;
  for (const bool checkpointed : {false, true}) {
    for (const bool bf16 : {false, true})
      for (const int stage : {0, 1, 2}) choices.push_back({.stage = stage, .bf16 = bf16, .checkpointed = checkpointed});
    for (const bool bf16 : {false, true})
      for (const bool reshard : {false, true}) choices.push_back({3, reshard, bf16, checkpointed});
  }
  return choices;
}

ZeroOptions zero_options(const TrainingChoice& choice, WrapPolicy units) {
  ZeroOptions options{.stage = choice.stage};
  if (choice.stage < 3) {
    if (choice.offload) options.oss.offload = {.params = true, .grads = true};
    return options;
  }
  options.fsdp.auto_wrap = std::move(units);
  options.fsdp.reshard_after_forward = choice.reshard_after_forward;
  options.fsdp.prefetch = choice.prefetch;
  options.fsdp.hybrid = {choice.ranks_per_copy, choice.ranks_per_secondary_copy};
  if (choice.offload) options.fsdp.offload = {.params = true, .grads = true};
  if (choice.bf16) {
    options.fsdp.mixed_precision.param_dtype = at::kBFloat16;
    options.fsdp.mixed_precision.reduce_dtype = at::kFloat;
  }
  return options;
}

std::string options_text(const TrainingChoice& choice, const std::string& units) {
  std::string text = "tessera::ZeroOptions{.stage = " + std::to_string(choice.stage), fsdp;
  const auto add = [&](const std::string& option) { fsdp += (fsdp.empty() ? "" : ", ") + option; };
  if (choice.stage < 3) {
    if (choice.offload) text += ", .oss = {.offload = {.params = true, .grads = true}}";
  } else {
    if (!units.empty()) add(".auto_wrap = " + units);
    if (!choice.reshard_after_forward) add(".reshard_after_forward = false");
    if (choice.bf16) add(".mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}");
    if (choice.offload) add(".offload = {.params = true, .grads = true}");
    if (choice.prefetch != 1) add(".prefetch = " + std::to_string(choice.prefetch));
    std::string hybrid;
    if (choice.ranks_per_copy != 0) hybrid = ".ranks_per_copy = " + std::to_string(choice.ranks_per_copy);
    if (choice.ranks_per_secondary_copy != 0)
      hybrid += (hybrid.empty() ? "" : ", ") +
                (".ranks_per_secondary_copy = " + std::to_string(choice.ranks_per_secondary_copy));
    if (!hybrid.empty()) add(".hybrid = {" + hybrid + "}");
    if (!fsdp.empty()) text += ", .fsdp = {" + fsdp + "}";
  }
  text += "}";
  if (choice.bf16 && choice.stage < 3) text += ", at::autocast to bfloat16 around forward and loss";
  if (choice.checkpointed) text += ", tessera::checkpointed(layer, x) for each layer";
  if (choice.offload) text += ", tessera::HostAdamW";
  return text;
}

}  // namespace tessera
