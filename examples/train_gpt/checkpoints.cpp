#include "checkpoints.h"

#include <cstdio>

#include "tessera/comm/agreement.h"

namespace train_gpt {
namespace {

std::filesystem::path folder_of(const TrainOptions& options) { return options.out / "checkpoints"; }

std::string name_of_step(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(step));
  return name;
}

}  // namespace

Checkpoints::Checkpoints(const TrainOptions& options, int64_t windows, tessera::Communicator& comm, Trainable& model)
    : options_(options), windows_(windows), comm_(comm), model_(model) {}

// What has to be the same for step n to see the same sequences, and the same learning rate.
nlohmann::json Checkpoints::run_description() const {
  return {{"seed", options_.seed},
          {"sequences_per_step", comm_.size() * options_.batch * options_.accumulate},
          {"context", options_.model.context},
          {"windows", windows_},
          {"steps", options_.steps}};
}

int64_t Checkpoints::resume() {
  if (options_.resume.empty()) return 0;
  std::string path = options_.resume;
  if (path == "auto") {
    // Rank 0 decides: others might see a folder that changes.
    std::string found;
    if (comm_.rank() == 0) found = tessera::latest_checkpoint(folder_of(options_)).value_or("").string();
    path = tessera::gather_texts(comm_, found, "the latest checkpoint")[0];
    if (path.empty()) return 0;
  }
  const auto extra = tessera::load_checkpoint(path, model_.shards(), model_.optimizer());
  const auto own = run_description();
  if (!extra.contains("run") || !extra.contains("step"))
    throw OptionsError("--resume: " + path + " is not of a run of train_gpt");
  for (const auto& [name, value] : own.items())
    if (extra["run"].value(name, nlohmann::json()) != value)
      throw OptionsError("--resume: " + path + " is of a run with " + name + " " +
                         extra["run"].value(name, nlohmann::json()).dump() + ", this has " + value.dump() +
                         " (sequences_per_step is ranks * batch * accumulate)");
  return extra["step"].get<int64_t>();
}

void Checkpoints::after_step(int64_t step) {
  if (options_.save_every == 0 || (step % options_.save_every != 0 && step != options_.steps)) return;
  pending_ = tessera::save_checkpoint_async(folder_of(options_) / name_of_step(step), model_.shards(),
                                            model_.optimizer(), {{"step", step}, {"run", run_description()}},
                                            {.keep_last = static_cast<int>(options_.keep)});
}

void Checkpoints::finish() {
  if (pending_) pending_->wait();
}

}  // namespace train_gpt
