#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstdlib>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#ifdef TESSERA_HAS_ACCELERATOR
#include "tests/support/accelerator/ranks.h"
#endif

#include <tessera/optim/partial_step.h>
#include "oss/parameter_buckets.h"
#include "tests/support/built.h"
#include "tests/support/matrix.h"
#include "tests/support/temporary_folder.h"

namespace tessera::loops {
using namespace internal;
namespace {

// Models are small. These limits let wrappers treat them as large: no copies of gradients, and OSS steps in turns.
constexpr int64_t kZeroCopyBytes = 1;
[[maybe_unused]] const bool all_are_large = [] {
  least_step_bytes = 1;
  return true;
}();

std::unique_ptr<torch::optim::Optimizer> whole_optimizer(Optim kind, std::vector<at::Tensor> parameters) {
  using torch::optim::Adam, torch::optim::AdamOptions, torch::optim::SGD, torch::optim::SGDOptions;
  if (kind == Optim::kAdam) return std::make_unique<Adam>(std::move(parameters), AdamOptions(1e-2));
  const double momentum = kind == Optim::kMomentum ? 0.9 : 0;
  return std::make_unique<SGD>(std::move(parameters), SGDOptions(0.1).momentum(momentum));
}

template <class Adam = torch::optim::Adam, class SGD = torch::optim::SGD>
std::unique_ptr<ShardedOptimizer> sharded_optimizer(Optim kind, std::vector<at::Tensor> parameters,
                                                    std::shared_ptr<Communicator> comm, OssOptions options = {}) {
  using torch::optim::AdamOptions, torch::optim::SGDOptions;
  if (kind == Optim::kAdam) return std::make_unique<OSS<Adam>>(std::move(parameters), AdamOptions(1e-2), comm, options);
  const double momentum = kind == Optim::kMomentum ? 0.9 : 0;
  return std::make_unique<OSS<SGD>>(std::move(parameters), SGDOptions(0.1).momentum(momentum), comm, options);
}

// torch's optimizer, which steps some parameters at a time: OSS sends these while it steps the next ones.
template <class Base>
struct InTurns : Base, ChosenStep {
  using Base::Base;
  void step_parameters(const std::vector<at::Tensor>& chosen) override {
    std::vector<std::pair<at::Tensor, at::Tensor>> of_others;
    for (auto& group : this->param_groups())
      for (at::Tensor& parameter : group.params()) {
        if (std::ranges::any_of(chosen, [&](const at::Tensor& one) { return one.is_same(parameter); })) continue;
        of_others.emplace_back(parameter, std::exchange(parameter.mutable_grad(), {}));
      }
    Base::step();
    for (auto& [parameter, gradient] : of_others) parameter.mutable_grad() = gradient;
  }
};

double clip_by(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, double max_norm,
               double norm_type) {
  if (auto* sharded = dynamic_cast<ShardedOptimizer*>(&optimizer)) return sharded->clip_grad_norm_(max_norm, norm_type);
  return torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
}

// A process without a wrapper. Also a rank of OSS alone, which has the whole batch.
class OneProcess final : public Trainer {
 public:
  OneProcess(Model module, std::unique_ptr<torch::optim::Optimizer> optimizer)
      : Trainer(std::move(module)), optimizer_(std::move(optimizer)) {
    if (auto* sharded = dynamic_cast<ShardedOptimizer*>(optimizer_.get())) device = sharded->comm()->device();
  }
  at::Tensor operator()(const at::Tensor& x) override { return model->forward(x); }
  std::vector<at::Tensor> parameters() override { return unique_parameters(*model); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  void zero_grad(bool set_to_none) override { model->zero_grad(set_to_none); }
  ScopeExit no_sync() override {
    return ScopeExit([] {});
  }
  double clip_grad_norm_(double max_norm, double norm_type) override {
    return clip_by(*optimizer_, parameters(), max_norm, norm_type);
  }
  torch::OrderedDict<std::string, at::Tensor> state() override {
    torch::OrderedDict<std::string, at::Tensor> state;
    for (const auto& entry : model->named_parameters()) state.insert(entry.key(), entry.value().detach().clone());
    for (const auto& entry : model->named_buffers()) state.insert(entry.key(), entry.value().detach().clone());
    return state;
  }
  // Divides all later gradients: the loss is a sum over the rows of all ranks.
  void set_gradient_divide_factor(double factor) override {
    if (divisor_) return static_cast<void>(*divisor_ = factor);
    divisor_ = std::make_shared<double>(factor);
    for (auto& parameter : parameters())
      parameter.register_hook([divisor = divisor_](const at::Tensor& gradient) { return gradient / *divisor; });
  }
  int64_t divide_gradients_by_sum(int64_t own) override {
    set_gradient_divide_factor(static_cast<double>(own));
    return own;
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::shared_ptr<double> divisor_;
};

std::unique_ptr<Trainer> make_one_process(Model model, Optim kind) {
  auto optimizer = whole_optimizer(kind, unique_parameters(*model));
  auto alone = std::make_unique<OneProcess>(std::move(model), std::move(optimizer));
  alone->make_another = [kind](Model next) { return make_one_process(std::move(next), kind); };
  return alone;
}

// One rank of a wrapper. `optimizer` is null for Zero, which has its own.
template <class Wrapper>
class Rank final : public Trainer {
 public:
  Rank(Model module, std::unique_ptr<Wrapper> wrapper, std::unique_ptr<torch::optim::Optimizer> optimizer = nullptr)
      : Trainer(std::move(module)), optimizer_(std::move(optimizer)), wrapper_(std::move(wrapper)) {
    rank = wrapper_->comm()->rank();
    world = wrapper_->comm()->size();
    device = wrapper_->comm()->device();
  }
  at::Tensor operator()(const at::Tensor& x) override { return (*wrapper_)(x); }
  std::vector<at::Tensor> parameters() override { return wrapper_->parameters(); }
  torch::optim::Optimizer& optimizer() override {
    if constexpr (requires { wrapper_->optimizer(); }) {
      return wrapper_->optimizer();
    } else {
      return *optimizer_;
    }
  }
  void zero_grad(bool set_to_none) override { wrapper_->zero_grad(set_to_none); }
  ScopeExit no_sync() override { return wrapper_->no_sync(); }
  double clip_grad_norm_(double max_norm, double norm_type) override {
    if (auto* sharded = dynamic_cast<ShardedOptimizer*>(optimizer_.get()))
      return sharded->clip_grad_norm_(max_norm, norm_type);
    return wrapper_->clip_grad_norm_(max_norm, norm_type);
  }
  torch::OrderedDict<std::string, at::Tensor> state() override { return wrapper_->full_state_dict(); }
  void set_gradient_divide_factor(double factor) override { wrapper_->set_gradient_divide_factor(factor); }
  int64_t divide_gradients_by_sum(int64_t own) override { return wrapper_->divide_gradients_by_sum(own); }
  ModelShards* shards() override { return wrapper_.get(); }
  FullyShardedModule* fsdp() override {
    if constexpr (std::is_base_of_v<FullyShardedModule, Wrapper>) return wrapper_.get();
    return nullptr;
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<Wrapper> wrapper_;
};

using Ddp = DistributedDataParallel<Model>;
using Sdp = ShardedDataParallel<Model>;
using Fsdp = FullyShardedDataParallel<Model>;
using Comm = std::shared_ptr<Communicator>;

auto make_ddp_with(DdpOptions options) {
  return [options](Model model, Comm comm, Optim kind, const Play& play) -> std::unique_ptr<Trainer> {
    DdpOptions of_play = options;
    of_play.find_unused_parameters = play.unused;
    of_play.zero_copy_bytes = kZeroCopyBytes;
    auto ddp = std::make_unique<Ddp>(model, comm, of_play);
    auto optimizer = whole_optimizer(kind, ddp->parameters());
    return std::make_unique<Rank<Ddp>>(model, std::move(ddp), std::move(optimizer));
  };
}

auto make_ddp_oss(OssOptions oss) {
  return [oss](Model model, Comm comm, Optim kind, const Play& play) -> std::unique_ptr<Trainer> {
    const DdpOptions options{.find_unused_parameters = play.unused, .zero_copy_bytes = kZeroCopyBytes};
    auto ddp = std::make_unique<Ddp>(model, comm, options);
    auto optimizer = sharded_optimizer(kind, unique_parameters(*model), comm, oss);
    return std::make_unique<Rank<Ddp>>(model, std::move(ddp), std::move(optimizer));
  };
}

// No wrapper averages gradients: the ranks have equal rows.
std::unique_ptr<Trainer> make_oss_alone(Model model, Comm comm, Optim kind, const Play&) {
  auto optimizer = sharded_optimizer(kind, unique_parameters(*model), std::move(comm));
  return std::make_unique<OneProcess>(std::move(model), std::move(optimizer));
}

template <class Adam = torch::optim::Adam, class SGD = torch::optim::SGD>
auto make_oss_sdp(OssOptions oss, SdpOptions options) {
  options.zero_copy_bytes = kZeroCopyBytes;
  return [oss, options](Model model, Comm comm, Optim kind, const Play&) -> std::unique_ptr<Trainer> {
    auto optimizer = sharded_optimizer<Adam, SGD>(kind, unique_parameters(*model), comm, oss);
    auto sdp = std::make_unique<Sdp>(model, *optimizer, comm, options);
    return std::make_unique<Rank<Sdp>>(model, std::move(sdp), std::move(optimizer));
  };
}

auto make_fsdp(FsdpOptions options) {
  options.zero_copy_bytes = kZeroCopyBytes;
  return [options](Model model, Comm comm, Optim kind, const Play&) -> std::unique_ptr<Trainer> {
    auto fsdp = std::make_unique<Fsdp>(model, comm, options);
    auto optimizer = whole_optimizer(kind, fsdp->parameters());
    return std::make_unique<Rank<Fsdp>>(model, std::move(fsdp), std::move(optimizer));
  };
}

// On a disk: in a folder that is deleted with the last rank's wrapper.
std::unique_ptr<Trainer> make_fsdp_on_disk(Model model, Comm comm, Optim kind, const Play& play) {
  FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}};
  auto folder = std::make_shared<TemporaryFolder>();
  options.offload.directory = folder->path();
  auto run = make_fsdp(options)(std::move(model), std::move(comm), kind, play);
  run->keeps = std::move(folder);
  return run;
}

template <class Options>
std::unique_ptr<Trainer> make_zero_of(int stage, Model model, Comm comm, const Options& options, const Play& play) {
  using Stages = decltype(zero(model, options, comm));
  const ZeroOptions of_play{
      .stage = stage,
      .ddp = {.find_unused_parameters = play.unused, .zero_copy_bytes = kZeroCopyBytes},
      .sdp = {.zero_copy_bytes = kZeroCopyBytes},
      .fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .zero_copy_bytes = kZeroCopyBytes}};
  return std::make_unique<Rank<Stages>>(model, std::make_unique<Stages>(model, options, comm, of_play));
}

auto make_zero(int stage) {
  return [stage](Model model, Comm comm, Optim kind, const Play& play) {
    if (kind == Optim::kAdam) return make_zero_of(stage, model, comm, torch::optim::AdamOptions(1e-2), play);
    const double momentum = kind == Optim::kMomentum ? 0.9 : 0;
    return make_zero_of(stage, model, comm, torch::optim::SGDOptions(0.1).momentum(momentum), play);
  };
}

// The results of one process, or of one rank.
struct Record {
  std::vector<double> notes;
  torch::OrderedDict<std::string, at::Tensor> state;
  std::string error;
  bool has_ended = false;
};

void record_loop(Trainer& run, const Play& play, const Loop& loop, Record& record) {
  run.same_data = play.same_data;
  try {
    loop(run);
    for (const auto& entry : run.state()) record.state.insert(entry.key(), entry.value().cpu());
    record.has_ended = true;
  } catch (const std::exception& error) {
    record.error = error.what();
    record.notes = std::move(run.notes);
    throw;
  }
  record.notes = std::move(run.notes);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

bool is_close(const at::Tensor& value, const at::Tensor& expected, double rounding) {
  if (!at::isFloatingType(expected.scalar_type()) && !at::isComplexType(expected.scalar_type()))
    return torch::equal(value, expected);
  const bool fine = at::toRealValueType(expected.scalar_type()) == at::kDouble;
  return value.sizes() == expected.sizes() &&
         torch::allclose(value, expected.to(value.dtype()), rounding * (fine ? 1e-7 : 1e-4),
                         rounding * (fine ? 1e-9 : 1e-5));
}

// "" if the ranks' notes agree with those of the one process, as far as they ran.
std::string difference(const Record& expected, const std::vector<Record>& ranks, double rounding) {
  std::ostringstream text;
  size_t notes = expected.notes.size();
  for (const Record& record : ranks) {
    if (record.has_ended && record.notes.size() != notes && expected.has_ended)
      return "a rank has another number of notes";
    notes = std::min(notes, record.notes.size());
  }
  for (size_t i = 0; i < notes; ++i) {
    double mean = 0;
    for (const Record& record : ranks) mean += record.notes[i] / static_cast<double>(ranks.size());
    if (!(std::abs(mean - expected.notes[i]) <= 1e-5 * std::abs(expected.notes[i]) + rounding * 1e-8)) {
      text << "note " << i << " is " << mean << ", expected " << expected.notes[i];
      return text.str();
    }
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].has_ended || !expected.has_ended) continue;
    for (const auto& entry : expected.state) {
      const at::Tensor* value = ranks[rank].state.find(entry.key());
      if (value == nullptr) return entry.key() + " is not in the state";
      if (is_close(*value, entry.value(), rounding)) continue;
      text << entry.key() << " on rank " << rank;
      if (value->sizes() != entry.value().sizes()) {
        text << " has sizes " << value->sizes();
      } else {
        text << " differs by " << (*value - entry.value()).abs().max().item<double>();
      }
      return text.str();
    }
  }
  return "";
}

// Whether the text names its subject: a parameter or a unit of the model.
bool has_name(const std::string& text, const Net& model) {
  // Includes words of autograd, for errors that it finds, and of optimizers, which know parameters by their places.
  for (const char* words : {"(root)", "the root unit", "modified by an inplace operation", " of group ",
                            "parameter number ", "state_dict() on", " of the model'", "the ranks have diverged"})
    if (text.find(words) != std::string::npos) return true;
  for (const auto& entry : model.named_parameters())
    if (text.find(entry.key()) != std::string::npos) return true;
  for (const auto& entry : model.named_modules())
    if (!entry.key().empty() && text.find("'" + entry.key() + "'") != std::string::npos) return true;
  return text.find("extra") != std::string::npos;
}

std::vector<std::string> parts_of(const std::string& text, const std::string& between) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end = 0; (end = text.find(between, begin)) != std::string::npos; begin = end + between.size())
    parts.push_back(text.substr(begin, end - begin));
  parts.push_back(text.substr(begin));
  return parts;
}

// Returns the errors that docs/loops.md quotes, each as its pieces between "...". A piece omits "unit '...'", because
// an error may name the root unit instead.
std::vector<std::vector<std::string>> documented_refusals() {
  std::ifstream file(built(TESSERA_LOOPS_PAGE));
  TORCH_CHECK(file, "cannot read ", built(TESSERA_LOOPS_PAGE), ", which says what is refused");
  std::vector<std::vector<std::string>> refusals;
  for (std::string line; std::getline(file, line);) {
    const auto columns = parts_of(line, "| ");
    if (columns.size() < 4) continue;
    const auto quotes = parts_of(columns[2], "`");
    for (size_t i = 1; i < quotes.size(); i += 2) {
      std::string text = quotes[i];
      if (text.find(' ') == std::string::npos) continue;  // a type, or a call
      for (size_t unit = 0; (unit = text.find("unit '...'")) != std::string::npos;) text.replace(unit, 10, "...");
      refusals.push_back(parts_of(text, "..."));
    }
  }
  return refusals;
}

bool is_documented(const std::string& error) {
  static const auto refusals = documented_refusals();
  return std::ranges::any_of(refusals, [&](const std::vector<std::string>& pieces) {
    size_t at = 0;
    return std::ranges::all_of(pieces, [&](const std::string& piece) {
      at = error.find(piece, at);
      if (at == std::string::npos) return false;
      at += piece.size();
      return true;
    });
  });
}

bool says_one_of(const std::string& error, const std::vector<std::string>& texts) {
  return std::ranges::any_of(texts, [&](const std::string& text) { return error.find(text) != std::string::npos; });
}

// Returns "" if the loop is refused for the expected reason, else the problem.
std::string judge_reason(const Play& play, const Record& expected, const std::string& error) {
  if (!play.says.empty())
    return says_one_of(error, play.says) ? "" : "refused for another reason: " + first_line(error);
  if (play.expect == Expect::kRefused) return "the loop does not say what is refused: " + first_line(error);
  if (is_documented(error) || (!expected.has_ended && says_one_of(error, {first_line(expected.error)}))) return "";
  return "refused as docs/loops.md does not say: " + first_line(error);
}

// Returns the first problem of the ranks' results; "" if there is none.
std::string judge(const Play& play, const Record& expected, const std::vector<Record>& ranks, const std::string& error,
                  const Net& model) {
  const std::string wrong = difference(expected, ranks, play.rounding);
  if (error.empty()) {
    if (play.expect == Expect::kRefused && (!wrong.empty() || ranks.size() > 1 || !play.equal_alone))
      return "not refused, and " + (wrong.empty() ? "equal" : wrong);
    if (play.expect == Expect::kThrows || (!expected.has_ended && play.expect != Expect::kRefused))
      return "one process throws '" + first_line(expected.error) + "', the ranks do not";
    return wrong;
  }
  if (error.find("timed out") != std::string::npos) return "a rank waited for others in vain: " + first_line(error);
  if (play.expect == Expect::kEqual) return "throws " + first_line(error);
  if (!wrong.empty()) return "refused too late (" + first_line(error) + "): " + wrong;
  if (play.expect != Expect::kThrows && expected.has_ended && !has_name(error, model))
    return "names no parameter or unit: " + first_line(error);
  return judge_reason(play, expected, error);
}

const char* name_of(Optim kind) {
  return kind == Optim::kSgd ? "SGD" : (kind == Optim::kMomentum ? "momentum" : "Adam");
}

// Each world has one optimizer, so that the matrix stays quick.
std::vector<Optim> optimizers_at(int world, const Play& play) {
  if (!play.optimizers.empty()) return play.optimizers;
  if (world == 1) return {Optim::kSgd};
  if (world == 3) return {Optim::kMomentum};
  return {Optim::kAdam};
}

}  // namespace

Mlp::Mlp() {
  register_module("fc1", fc1);
  register_module("fc2", fc2);
  register_module("fc3", fc3);
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  at::Tensor h = fc1(x).tanh();
  if (in_forward) in_forward();
  if (!skip_fc2) h = fc2(h);
  if (hook && h.requires_grad()) h.register_hook(hook);
  h = h.tanh();
  if (extra) h = extra(h);
  return fc3(h);
}

Model mlp() {
  auto model = seeded(1, [] { return std::make_shared<Mlp>(); });
  model->to(at::kDouble);
  return model;
}

Model another_mlp() {
  auto model = seeded(2, [] { return std::make_shared<Mlp>(); });
  model->to(at::kDouble);
  return model;
}

at::Tensor Trainer::rows(int seed) const {
  // Uses its own generator: a checkpointed part of another rank, a thread, sets and restores the default one.
  const at::Tensor all =
      torch::randn({kRows, kFeatures}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 + seed)), at::kDouble);
  return (same_data ? all : all.slice(0, kRows * rank / world, kRows * (rank + 1) / world)).to(device);
}

void Trainer::train(int step) {
  optimizer().zero_grad();
  const at::Tensor value = loss(step);
  note(value);
  value.backward();
  optimizer().step();
}

void Trainer::note_state(Trainer& other) {
  for (const auto& entry : other.state()) note(entry.value().to(at::kDouble).square().sum());
}

void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.name; }

// Whether ranks have devices of the accelerator (tests/support/accelerator), in place of the CPU.
static bool is_on_accelerator() { return std::getenv("TESSERA_TEST_ACCELERATOR") != nullptr; }

// Sanitizers and the simulation take ten times as long. They find errors between ranks, for which two ranks suffice.
static std::vector<int> worlds_to_play() {
#ifdef TESSERA_HAS_ACCELERATOR
  if (is_on_accelerator() && accelerator::device_count() < 2) return {1};  // one GPU
#endif
  return is_on_accelerator() || std::getenv("TESSERA_TEST_TREES") != nullptr ? std::vector<int>{2}
                                                                             : std::vector<int>{1, 2, 3, 4};
}

static void on_ranks_of_choice(int world, const std::function<void(std::shared_ptr<Communicator>)>& body,
                               const InitOptions& options) {
  if (!is_on_accelerator()) return run_ranks(world, body, options);
#ifdef TESSERA_HAS_ACCELERATOR
  const accelerator::Simulation simulation;
  accelerator::on_devices(world, body, options);
  for (const std::string& finding : accelerator::Simulation::findings()) ADD_FAILURE() << finding;
#else
  throw std::logic_error("this program has no accelerator");
#endif
}

std::vector<Setup> fsdp_setups() {
  const WrapPolicy linears = wrap_modules<torch::nn::LinearImpl>();
  const std::vector<int> worlds = worlds_to_play();
  std::vector<Setup> setups = {
      {"fsdp", 3, worlds, make_fsdp({})},
      {"fsdp_keep", 3, worlds, make_fsdp({.auto_wrap = linears, .reshard_after_forward = false})},
      {"fsdp_units", 3, worlds, make_fsdp({.auto_wrap = linears})},
      {"fsdp_offload", 3, worlds, make_fsdp({.auto_wrap = linears, .offload = {.params = true, .grads = true}})},
      {"fsdp_hybrid", 3, {4}, make_fsdp({.auto_wrap = linears, .hybrid = {.ranks_per_copy = 2}})},
      {"fsdp_half_offload", 3, worlds,
       make_fsdp({.auto_wrap = linears, .offload = {.params = true, .grads = true, .device_fraction = 0.5}}),
       /*takes_turns=*/true},
      {"fsdp_disk", 3, worlds, make_fsdp_on_disk, /*takes_turns=*/true},
  };
  if (!has_full_matrix()) return setups;
  const auto more = [&](const char* name, const FsdpOptions& options, const std::vector<int>& at) {
    setups.push_back({name, 3, at, make_fsdp(options)});
  };
  more("fsdp_alone", {.auto_wrap = linears, .prefetch = 0, .keep_recent = 1}, worlds);
  more("fsdp_ahead", {.auto_wrap = linears, .prefetch = 3, .keep_recent = 5, .check_finite = true}, worlds);
  more("fsdp_keep_offload",
       {.auto_wrap = linears, .reshard_after_forward = false, .offload = {.params = true, .grads = true}}, worlds);
  more("fsdp_offload_params", {.auto_wrap = linears, .offload = {.params = true}}, worlds);
  more("fsdp_reduce_dtype", {.auto_wrap = linears, .mixed_precision = {.reduce_dtype = at::kDouble}}, worlds);
  more("fsdp_secondary", {.auto_wrap = linears, .hybrid = {.ranks_per_secondary_copy = 2}}, {4});
  more("fsdp_secondary_copies", {.auto_wrap = linears, .hybrid = {.ranks_per_copy = 2, .ranks_per_secondary_copy = 1}},
       {4});
  more("fsdp_hybrid_keep", {.auto_wrap = linears, .reshard_after_forward = false, .hybrid = {.ranks_per_copy = 2}},
       {4});
  return setups;
}

std::vector<Setup> replicated_setups() {
  const std::vector<int> worlds = worlds_to_play();
  // Parameters are sent one by one.
  const OssOptions host{.broadcast_bucket_bytes = 100, .offload = {.params = true}};
  std::vector<Setup> setups = {
      {"ddp", 0, worlds, make_ddp_with({})},
      // Gradients are no views of buckets, because optimizers that detach gradients in place do not support views.
      {"ddp_copies", 0, worlds, make_ddp_with({.gradient_as_bucket_view = false})},
      {"ddp_oss", 1, worlds, make_ddp_oss({})},
      {"oss_sdp", 2, worlds, make_oss_sdp({}, {})},
      {"oss_sdp_offload", 2, worlds, make_oss_sdp(host, {})},
  };
  const auto more = [&](const char* name, int stage, auto make) {
    setups.push_back({name, stage, worlds, make, /*takes_turns=*/true});
  };
  OssOptions all_on_host = host;
  all_on_host.offload.grads = true;
  more("ddp_oss_offload", 1, make_ddp_oss(host));
  more("oss_sdp_offload_grads", 2, make_oss_sdp(all_on_host, {}));
  more("zero0", 0, make_zero(0));
  more("zero1", 1, make_zero(1));
  more("zero2", 2, make_zero(2));
  if (!is_on_accelerator()) more("oss_alone", 1, make_oss_alone);
  // Each parameter is a bucket of its own, reduced where autograd left its gradient.
  more("ddp_buckets", 0, make_ddp_with({.bucket_bytes = 105, .first_bucket_bytes = 10}));
  if (!has_full_matrix()) return setups;
  setups.push_back({"ddp_backend", 0, worlds, make_ddp_with({.backend_all_reduce = true})});
  setups.push_back({"oss_sdp_buckets", 2, worlds, make_oss_sdp({}, {.reduce_bucket_bytes = 0})});
  return setups;
}

std::vector<Setup> all_setups() {
  auto setups = replicated_setups();
  for (auto& setup : fsdp_setups()) setups.push_back(setup);
  setups.push_back({"zero3", 3, worlds_to_play(), make_zero(3), /*takes_turns=*/true});
  // Each parameter is a bucket of its own, stepped in a turn of its own.
  const auto in_turns = make_oss_sdp<InTurns<torch::optim::Adam>, InTurns<torch::optim::SGD>>;
  setups.push_back({"oss_sdp_turns", 2, worlds_to_play(), in_turns({.broadcast_bucket_bytes = 1}, {}), true});
  return setups;
}

static size_t place_among(const std::vector<Setup>& setups, const std::string& name) {
  return std::find_if(setups.begin(), setups.end(), [&](const Setup& one) { return one.name == name; }) -
         setups.begin();
}

// Setups differ in few functions, so each loop is played in half of them. Sanitizers take ten times as long: each of
// the two plays one in eight, in other setups. `make matrix` plays all.
static bool is_left_out(size_t turn) {
#if defined(__SANITIZE_ADDRESS__)
  return turn % 8 != 1;
#elif defined(__SANITIZE_THREAD__)
  return turn % 8 != 5;
#else
  return turn % 2 != 0;
#endif
}

std::vector<int> worlds_of(const Setup& setup) {
  if (has_full_matrix()) return setup.worlds;
  static const std::vector<Setup> setups = all_setups();
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = test->name();  // <loop>/<setup>
  size_t turn = place_among(setups, setup.name);
  for (char letter : name.substr(0, name.find('/'))) turn += static_cast<unsigned char>(letter);
  if (is_left_out(turn) || (setup.takes_turns && turn % 16 >= 8)) return {};
  if (setup.worlds.size() < 2) return setup.worlds;
  std::vector<int> worlds{static_cast<int>(2 + (setup.takes_turns ? turn / 4 : turn) % 3)};
  if (turn % 4 == 0 && !setup.takes_turns) worlds.push_back(1);
  return worlds;
}

Outcome outcome_of(const Setup& setup, const Play& given, const Loop& loop, int world, Optim kind,
                   std::chrono::milliseconds timeout) {
  Play play = given;
  // Each rank of OSS alone runs the loop like the one process, without a wrapper that could refuse it.
  if (setup.name == "oss_alone" && play.expect == Expect::kRefused) play.expect = Expect::kEither;
  InitOptions options;
  options.timeout = timeout;
  at::set_num_threads(1);
  Record expected;
  const auto alone = make_one_process(play.model(), kind);
  try {
    record_loop(*alone, play, loop, expected);
  } catch (const std::exception&) {  // recorded
  }
  std::vector<Record> ranks(world);
  Outcome outcome;
  try {
    on_ranks_of_choice(
        world,
        [&](std::shared_ptr<Communicator> comm) {
          at::set_num_threads(1);
          auto make = [&](const Model& model) {
            if (!comm->device().is_cpu()) model->to(comm->device());
            return setup.make(model, comm, kind, play);
          };
          std::unique_ptr<Trainer> run = make(play.model());
          run->make_another = make;
          record_loop(*run, play, loop, ranks[comm->rank()]);
        },
        options);
  } catch (const testing::AssertionException&) {  // there is no GPU: the test is skipped
    throw;
  } catch (const std::exception& thrown) {
    outcome.error = thrown.what();
  }
  outcome.expected_error = expected.error;
  outcome.wrong = judge(play, expected, ranks, outcome.error, *play.model());
  return outcome;
}

void play(const Setup& setup, const Play& play, const Loop& loop) {
  for (int world : worlds_of(setup)) {
    for (Optim kind : optimizers_at(world, play)) {
      const Outcome outcome = outcome_of(setup, play, loop, world, kind);
      if (!outcome.wrong.empty())
        ADD_FAILURE() << setup.name << " world " << world << " " << name_of(kind) << ": " << outcome.wrong;
    }
  }
}

}  // namespace tessera::loops
