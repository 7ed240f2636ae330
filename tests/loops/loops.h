#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/reference.h"

// A training loop as a libtorch user writes it. One process runs it on the whole batch, with a torch optimizer. The
// ranks of every wrapper run it, each with its part of the rows. Losses are means over rows, so the ranks' results must
// equal those of the one process, to rounding in fp64. Otherwise the wrapper must refuse the loop by name.
namespace tessera::loops {
using namespace internal;

using namespace testing_support;

constexpr int64_t kRows = 12, kFeatures = 8;

struct Net : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};
using Model = std::shared_ptr<Net>;

// Three layers: fc1, fc2, fc3. `hook`, if set, is registered on fc2's output.
struct Mlp : Net {
  Mlp();
  at::Tensor forward(const at::Tensor& x) override;
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures}, fc3{kFeatures, kFeatures};
  torch::nn::Linear extra{nullptr};  // used where a loop registers it
  std::function<at::Tensor(const at::Tensor&)> hook;
  std::function<void()> in_forward;
  bool skip_fc2 = false;
};
Model mlp();
Model another_mlp();  // of other values
// Returns a model of another class, in fp64.
template <class Module>
Model seeded_model(uint64_t seed) {
  return seeded(seed, []() -> Model {
    auto model = std::make_shared<Module>();
    model->to(at::kDouble);
    return model;
  });
}
inline Mlp& mlp_of(Net& net) { return dynamic_cast<Mlp&>(net); }

enum class Optim { kSgd, kMomentum, kAdam };

// The interface that a loop uses. It runs in one process alone, or as one rank of a wrapper.
class Trainer {
 public:
  explicit Trainer(Model module) : model(std::move(module)) {}
  virtual ~Trainer() = default;
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  const Model model;
  virtual at::Tensor operator()(const at::Tensor& x) = 0;
  virtual std::vector<at::Tensor> parameters() = 0;
  virtual torch::optim::Optimizer& optimizer() = 0;
  virtual void zero_grad(bool set_to_none = true) = 0;
  virtual ScopeExit no_sync() = 0;
  virtual double clip_grad_norm_(double max_norm, double norm_type = 2) = 0;
  virtual torch::OrderedDict<std::string, at::Tensor> state() = 0;  // collective
  virtual void set_gradient_divide_factor(double factor) = 0;
  // Divides gradients by the sum over all processes of `own`, this process's share.
  virtual int64_t divide_gradients_by_sum(int64_t own) = 0;
  virtual ModelShards* shards() { return nullptr; }  // null without a wrapper
  // Null except under FullyShardedDataParallel.
  virtual FullyShardedModule* fsdp() { return nullptr; }
  // The same wrapper and optimizer around another model.
  std::unique_ptr<Trainer> another(Model module) { return make_another(std::move(module)); }

  // This process's rows of a step's batch.
  at::Tensor x(int step) const { return rows(2 * step); }
  at::Tensor y(int step) const { return rows(2 * step + 1); }
  at::Tensor loss(int step) { return torch::mse_loss((*this)(x(step)), y(step)); }
  // optimizer.zero_grad(), forward, backward, step.
  void train(int step);

  // A mean over rows: the ranks' mean must be that of the one process.
  void note(const at::Tensor& mean) { notes.push_back(mean.item<double>()); }
  void note_state(Trainer& other);

  int rank = 0, world = 1;
  at::Device device = at::kCPU;  // of rows and parameters
  bool same_data = false;
  std::vector<double> notes;
  std::function<std::unique_ptr<Trainer>(Model)> make_another;
  std::shared_ptr<void> keeps;  // destroyed after the wrapper

 private:
  at::Tensor rows(int seed) const;
};

using Loop = std::function<void(Trainer&)>;
inline void three_steps(Trainer& run) {
  for (int step = 0; step < 3; ++step) run.train(step);
}

// In single precision: autocast leaves others alone.
inline Model in_single(Model model) {
  model->to(at::kFloat);
  return model;
}
inline void three_steps_under_autocast(Trainer& run) {
  for (int step = 0; step < 3; ++step) {
    run.optimizer().zero_grad();
    std::optional<Autocast> autocast(std::in_place, at::kCPU);
    const at::Tensor out = run(run.x(step).to(at::kFloat));
    autocast.reset();
    torch::mse_loss(out.to(at::kFloat), run.y(step).to(at::kFloat)).backward();
    run.optimizer().step();
  }
}

enum class Expect {
  kEqual,    // to the one process
  kRefused,  // by name
  kEither,
  kThrows,  // as the one process does
};

struct Play {
  Expect expect = Expect::kEqual;
  std::function<Model()> model = mlp;
  // Every rank has the whole batch: for models that look at rows together, or change their inputs.
  bool same_data = false;
  // Some parameters are not used in each step: DdpOptions::find_unused_parameters.
  bool unused = false;
  double rounding = 1;  // how many times the rounding of other loops
  // Texts of which a refusal must contain one. If empty, a loop that may be refused needs an error of docs/loops.md.
  std::vector<std::string> says = {};
  // Whether a world of one may run a loop that larger worlds refuse, if its result is right.
  bool equal_alone = false;
  // Empty: each optimizer at one of the worlds.
  std::vector<Optim> optimizers = {};
};

struct Setup {
  std::string name;
  int stage;
  std::vector<int> worlds;
  std::function<std::unique_ptr<Trainer>(Model, std::shared_ptr<Communicator>, Optim, const Play&)> make;
  // A variant of other setups: in the short form it plays one in four loops.
  bool takes_turns = false;
};
void PrintTo(const Setup& setup, std::ostream* out);

std::vector<Setup> all_setups();
std::vector<Setup> fsdp_setups();
std::vector<Setup> replicated_setups();  // stages 0 to 2

// Returns the worlds at which the setup plays the running test: in the full matrix all, else one of 2, 3 and 4. One in
// four loops is also played at 1, but not with sanitizers or by setups that take turns. Empty for half of the loops.
std::vector<int> worlds_of(const Setup& setup);

// The result of a loop that one process and the setup's ranks have run.
struct Outcome {
  std::string wrong;           // "": equal, or refused by name before anything was wrong, as the play expects
  std::string error;           // that the ranks threw
  std::string expected_error;  // that the one process threw
};
Outcome outcome_of(const Setup& setup, const Play& play, const Loop& loop, int world, Optim kind,
                   std::chrono::milliseconds timeout = std::chrono::seconds(20));

// Expectation for a backward between a step and zero_grad(): refused if a step drops gradients (offload.grads).
inline Expect where_gradients_stay(const Setup& setup) {
  return setup.name == "oss_sdp_offload_grads" ? Expect::kRefused : Expect::kEqual;
}

inline const std::vector<std::string> kDropped{"was dropped when a step had taken it"};
// Why ShardedDataParallel does not support loops with their own optimizers.
inline constexpr char kOwnersAlone[] = "only owners have gradients (docs/loops.md, Not supported)";

// Calls outcome_of() at the setup's worlds, and fails the test if an outcome is wrong.
void play(const Setup& setup, const Play& play, const Loop& loop);

inline bool is_sharded(const Setup& setup) { return setup.stage == 3; }
inline bool is_at_owners(const Setup& setup) { return setup.stage == 2; }
// Expectation for a loop that only FullyShardedDataParallel refuses.
inline Expect unless_sharded(const Setup& setup) { return is_sharded(setup) ? Expect::kRefused : Expect::kEqual; }

inline void step_with(Trainer& run, const at::Tensor& loss) {
  run.note(loss.detach());
  loss.backward();
  run.optimizer().step();
  run.optimizer().zero_grad();
}
inline void set_frozen(torch::nn::Module& module, bool frozen) {
  for (auto& parameter : module.parameters()) parameter.requires_grad_(!frozen);
}

// Has two elements, fewer than three or four ranks.
struct Tiny : Net {
  Tiny() { scale = register_parameter("scale", torch::tensor({0.5, 0.25})); }
  at::Tensor forward(const at::Tensor& x) override { return x * scale[0] + scale[1]; }
  at::Tensor scale;
};

inline std::string setup_name(const testing::TestParamInfo<Setup>& info) { return info.param.name; }

}  // namespace tessera::loops

// A suite whose tests are run for each of the setups: TEST_P(Suite, Name) { play(GetParam(), {}, ...); }
#define TESSERA_LOOPS(Suite, setups)                     \
  class Suite : public testing::TestWithParam<Setup> {}; \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite);  \
  INSTANTIATE_TEST_SUITE_P(Loops, Suite, testing::ValuesIn(setups()), setup_name)
