// Construction of Scheduler, its observers, and calls by the user. The phases of a step are in scheduler.cpp.
#include "fsdp/scheduler.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "core/model/shard_norm.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "core/runtime/require.h"
#include "fsdp/checks/parameter_checks.h"

namespace tessera::internal {
namespace {

void describe_order(std::ostream& text, const char* pass, const PrefetchOrder& order, size_t most,
                    const ShardedModel& model) {
  const auto& seen = order.seen().empty() ? order.expected() : order.seen();
  if (seen.empty()) return;
  text << "  order seen in " << pass << ":";
  const size_t shown = std::min(seen.size(), most);
  for (size_t i = 0; i < shown; ++i) text << (i == 0 ? " " : ", ") << model.units()[seen[i]]->name();
  text << (shown < seen.size() ? ", ...\n" : "\n");
}

}  // namespace

// ---- construction ---------------------------------------------------------------------------------

std::shared_ptr<Scheduler> Scheduler::wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                           const FsdpOptions& options) {
  if (!comm) throw std::invalid_argument("FullyShardedDataParallel: the communicator is null");
  require_residency();
  std::shared_ptr<Scheduler> scheduler(new Scheduler(module, std::move(comm), options));
  Binding& binding = scheduler->gradients_.binding();
  const std::string label = binding.parameters().empty() ? "" : binding.label(0);
  binding.set_take(while_alive(
      std::weak_ptr(scheduler),
      [](Scheduler& self, size_t parameter, const at::Tensor& gradient) { return self.take(parameter, gradient); },
      [label](size_t, const at::Tensor&) -> at::Tensor {
        throw std::logic_error(label +
                               " would get a gradient of a forward through a wrapper that no longer exists: keep the "
                               "wrapper until backward is over");
      }));
  binding.hook_all();
  return scheduler;
}

Scheduler::Scheduler(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options)
    : BackwardPass(comm->device(), module),
      model_(module, std::move(comm), options, this),
      gradients_(model_,
                 [this](const auto& change) {
                   std::lock_guard lock(mutex_);
                   change();
                 }),
      unsharded_(model_) {}

std::string Scheduler::name() const { return "FullyShardedDataParallel on rank " + model_.rank_text(); }

// ---- observers of gradients ------------------------------------------------------------------------

void Scheduler::observe_gradients(GradientReducer::Observer observer, std::function<void()> failed) {
  std::lock_guard lock(mutex_);
  require_outside_backward("on_gradients");
  if (observer && observer_) throw std::logic_error("on_gradients: a StepInBackward exists already, expected one");
  require(!observer || !model_.options().check_finite,
          "on_gradients with FsdpOptions::check_finite: the check comes at the end of backward, when steps have been "
          "taken already");
  gradients_.reducer().set_observer(!observer ? GradientReducer::Observer()
                                              : [this](const auto& leaves) { to_observe_.push_back(leaves); });
  observer_ = std::move(observer);
  observer_of_failures_ = std::move(failed);
}

void Scheduler::tell_observer() {
  GradientReducer::Observer observer;
  std::vector<std::vector<at::Tensor>> buckets;
  {
    std::lock_guard lock(mutex_);
    if (to_observe_.empty()) return;
    buckets.swap(to_observe_);
    observer = observer_;
  }
  for (const auto& leaves : buckets) observer(leaves);
}

void Scheduler::after_failure() {
  std::function<void()> observer;
  {
    std::lock_guard lock(mutex_);
    observer = observer_of_failures_;
  }
  if (observer) observer();
}

// ---- requests ---------------------------------------------------------------------------------------

void Scheduler::set_divisor(double divisor) {
  std::lock_guard lock(mutex_);
  gradients_.reducer().set_divisor(divisor);
}

std::optional<double> Scheduler::divisor() const {
  std::lock_guard lock(mutex_);
  return gradients_.reducer().divisor();
}

void Scheduler::require_capturable() const {
  const FsdpOptions& options = model_.options();
  BackwardPass::require_capturable({{options.offload.params || options.offload.grads, "FsdpOptions::offload"},
                                    {options.check_finite, "FsdpOptions::check_finite"},
                                    {options.refuse_uneven_use, "the option refuse_uneven_use"},
                                    {!!observer_, "an optimizer that steps in backward (on_gradients)"},
                                    {summon_ != Summon::kNone, "summon_full_params"},
                                    {!reduces(), "no_sync"}});
}

void Scheduler::prepare_capture() {
  std::lock_guard lock(mutex_);
  require_capturable();
  NoGradNoInferenceGuard quiet;
  recover();
  unsharded_.reshard_all();  // recorded work must not wait for all-gathers of an earlier evaluation
  gradients_.binding().move_hooks_to_current_stream();
}

void Scheduler::prepare_replay() {
  std::lock_guard lock(mutex_);
  require_capturable();
  require_use("a captured step");
  NoGradNoInferenceGuard quiet;
  begin_look();
  for (auto& unit : model_.units()) inspect(*unit);
}

void Scheduler::refuse_use(std::string reason) {
  std::lock_guard lock(mutex_);
  refusal_ = std::move(reason);
}

void Scheduler::summon(const SummonOptions& options) {
  const UserCall call(*this, "summon_full_params()");
  std::lock_guard lock(mutex_);
  require_outside_backward("summon_full_params");
  require_use("summon_full_params");
  if (summon_ != Summon::kNone) throw std::logic_error("summon_full_params inside another summon_full_params");
  Communicator& world = *model_.mesh().world;
  const std::vector<Unit*> chosen = model_.units_named(checked(options).units);
  NoGradNoInferenceGuard quiet;
  recover();
  for (auto& unit : model_.units()) inspect(*unit);
  unsharded_.reshard_all();
  summon_ = options.rank0_only && world.rank() != 0              ? Summon::kElsewhere
            : options.offload_to_cpu && !world.device().is_cpu() ? Summon::kOnHost
                                                                 : Summon::kOnDevice;
  using Changes = SummonedParameters::Changes;
  try {
    for (Unit* unit : chosen) unit->summon(summon_, options.writeback ? Changes::kWrittenBack : Changes::kLost);
    world.throw_if_aborted("summon_full_params");
  } catch (...) {
    dismiss_units(/*writeback=*/false);
    throw;
  }
}

void Scheduler::dismiss(bool writeback) {
  std::lock_guard lock(mutex_);
  NoGradNoInferenceGuard quiet;
  dismiss_units(writeback);
}

void Scheduler::dismiss_units(bool writeback) {
  for (auto& unit : model_.units())
    if (unit->is_summoned()) unit->dismiss(writeback);
  summon_ = Summon::kNone;
  for (auto& unit : model_.units()) inspect(*unit);
  unsharded_.reshard_all();
}

void Scheduler::show_in_shards() {
  std::lock_guard lock(mutex_);
  if (inside_backward() || is_running()) return;  // the running pass needs unchanged shards
  NoGradNoInferenceGuard quiet;
  begin_look();
  for (auto& unit : model_.units()) unit->is_summoned() ? unit->write_back() : reattach(*unit, /*may_change=*/true);
}

const std::vector<NamedShard>& Scheduler::named_shards() {
  std::lock_guard lock(mutex_);
  if (inside_backward() || is_running()) return model_.named_shards();
  NoGradNoInferenceGuard quiet;
  for (auto& unit : model_.units()) reattach(*unit, /*may_change=*/true);
  gradients_.follow_freezing();
  return model_.named_shards();
}

bool Scheduler::shows_exact_values() const {
  std::lock_guard lock(mutex_);
  return summon_ != Summon::kNone &&
         std::ranges::all_of(model_.units(), [](const auto& unit) { return unit->is_summoned(); });
}

GradNorm Scheduler::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  require_outside_backward("clip_grad_norm_");
  const UserCall call(*this, "clip_grad_norm_()");
  NoGradNoInferenceGuard quiet;
  return clip_shards_by_norm(gradients_.ready(), max_norm, norm_type, error_if_nonfinite, *model_.mesh().shard);
}

void Scheduler::visit_full_state(const ShardedModel::VisitState& visit, const StateDictOptions& options) {
  const UserCall call(*this, "full_state_dict()");
  NoGradNoInferenceGuard quiet;
  {
    std::lock_guard lock(mutex_);
    require_outside_backward("full_state_dict");
    require_use("full_state_dict");
    require<std::logic_error>(summon_ != Summon::kElsewhere, "full_state_dict on rank ", model_.rank_text(),
                              " while full parameters are summoned on rank 0 only: leave the scope first");
    begin_look();
    for (auto& unit : model_.units()) reattach(*unit, /*may_change=*/true);
  }
  model_.visit_full_state(visit, options);
}

MemoryReport Scheduler::memory() const {
  std::lock_guard lock(mutex_);
  MemoryReport report = model_.memory();
  gradients_.reducer().report(report);
  report.device_bytes += report.bucket_bytes;
  return report;
}

void Scheduler::reset_peak_memory() {
  std::lock_guard lock(mutex_);
  model_.reset_peak_memory();
  gradients_.reducer().reset_peak();
}

std::string Scheduler::describe() const {
  std::lock_guard lock(mutex_);
  std::ostringstream text;
  model_.describe(text);
  describe_order(text, "forward", unsharded_.forward_order(), unsharded_.most_seen(), model_);
  describe_order(text, "backward", unsharded_.backward_order(), unsharded_.most_seen(), model_);
  return text.str();
}

}  // namespace tessera::internal
