#include "tests/loops/drawn_program.h"

#include <algorithm>
#include <future>
#include <iterator>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "tests/support/random_net.h"

namespace tessera::loops {
using namespace internal;
namespace {

// Two trees and a layer at each end, so that every output depends on something that is trained.
struct DrawnNet : Net {
  explicit DrawnNet(unsigned tree) : first(tree), second(tree + 1) {
    register_module("first", first);
    register_module("second", second);
    register_module("entry", entry);
    register_module("exit", exit);
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = first(entry(x));
    if (in_forward) in_forward();
    if (hook && h.requires_grad()) h.register_hook(hook);
    return exit(skips_second ? h : second(h)).tanh();
  }

  RandomNet first, second;
  torch::nn::Linear entry{kFeatures, kFeatures}, exit{kFeatures, kFeatures};
  std::function<void()> in_forward;
  std::function<at::Tensor(const at::Tensor&)> hook;
  bool skips_second = false;
};

Model drawn_net(unsigned tree, uint64_t values) {
  return seeded(values, [tree]() -> Model {
    auto model = std::make_shared<DrawnNet>(tree);
    model->to(at::kDouble);
    return model;
  });
}

// Whether a row of the output depends on other rows.
bool mixes_rows(unsigned tree) {
  for (const auto& module : drawn_net(tree, 1)->modules())
    if (module->as<torch::nn::BatchNorm1d>() || module->as<torch::nn::GRU>() ||
        module->as<torch::nn::MultiheadAttention>())
      return true;
  return false;
}

struct UsersError : std::runtime_error {
  UsersError() : std::runtime_error("the user's own") {}
};

void expect_own_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    if (std::string(error.what()).find("the user's own") == std::string::npos) throw;
    return;
  }
  throw std::runtime_error("the user's exception was lost");
}

std::string snapshot(const torch::optim::Optimizer& optimizer) {
  std::ostringstream out;
  torch::save(optimizer, out);
  return out.str();
}

}  // namespace

// One model of the program, and the variables of its loop.
struct Player {
  Player(Trainer& trainer, std::string checkpoint, const DrawnProgram& program)
      : run(trainer), name(std::move(checkpoint)), tree(program.tree), steps_own_sums(program.steps_own_sums) {}
  ~Player() {
    losses.clear();
    alone.reset();
  }
  DrawnNet& net() { return dynamic_cast<DrawnNet&>(*run.model); }
  void backward(const at::Tensor& loss, bool retains = false) {
    has_own_sums = alone != nullptr;
    loss.backward({}, retains);
  }
  std::vector<at::Tensor> module_parameters() { return unique_parameters(*run.model); }
  at::Tensor module_parameter(size_t index) {
    const auto parameters = module_parameters();
    return parameters[index % parameters.size()];
  }

  // Must be called after set_data() of parameters. Without a call of parameters() FSDP loses the step that follows, as
  // docs/loops.md says.
  void adopt_new_data() {
    if (run.fsdp() != nullptr) run.parameters();
  }

  Trainer& run;
  const std::string name;  // of its checkpoint
  const unsigned tree;
  const bool steps_own_sums;
  bool has_own_sums = false;         // whether the last backward ran under no_sync()
  std::vector<at::Tensor> losses;    // of forwards without a backward so far
  std::unique_ptr<ScopeExit> alone;  // no_sync
  std::vector<at::Tensor> average;
  bool is_saved = false;
  torch::OrderedDict<std::string, at::Tensor> saved_values;  // without a wrapper
  std::string saved_optimizer;
  std::optional<OptimizerStateDict> saved_state;
};

namespace {

class Drawer {
 public:
  explicit Drawer(uint64_t seed) : random_(seed) {}

  DrawnProgram draw(uint64_t seed) {
    DrawnProgram program{.seed = seed, .optim = Optim(pick(3)), .tree = static_cast<unsigned>(pick(100000))};
    // In at least three of four programs rows are independent of each other, so ranks have different rows.
    const bool any = one_in(4);
    while (!any && mixes_rows(program.tree)) program.tree = static_cast<unsigned>(pick(100000));
    program.same_data = mixes_rows(program.tree);
    const int models = pick(6) == 0 ? 2 : 1;
    for (int64_t iteration = 0, iterations = 2 + pick(3); iteration < iterations; ++iteration) {
      auto actions = draw_iteration();
      for (int64_t extra = 0, extras = pick(4); extra < extras; ++extra)
        actions.insert(actions.begin() + pick(static_cast<int64_t>(actions.size()) + 1), draw_extra());
      const int model = models == 1 ? 0 : static_cast<int>(pick(models));
      for (auto& action : actions) action.model = model;
      const auto at = models == 1 ? program.actions.end()
                                  : program.actions.end() - std::min<int64_t>(pick(3), program.actions.size());
      program.actions.insert(at, actions.begin(), actions.end());
    }
    return program;
  }

 private:
  int64_t pick(int64_t choices) { return static_cast<int64_t>(random_() % choices); }
  bool one_in(int64_t n) { return pick(n) == 0; }

  std::vector<Action> draw_iteration() {
    std::vector<Action> actions;
    if (!one_in(6)) actions.push_back(zero_grad());
    const int64_t parts = 1 + (one_in(2) ? pick(3) : 0);
    const bool alone = parts > 1 && one_in(2);
    switch (pick(4)) {
      case 0:  // all forwards, one backward of the sum
        for (int64_t part = 0; part < parts; ++part) actions.push_back(forward());
        actions.push_back(backward_of_sum());
        break;
      case 1:  // all forwards, then all backwards
        for (int64_t part = 0; part < parts; ++part) actions.push_back(forward());
        for (int64_t part = 0; part < parts; ++part) actions.push_back(backward(one_in(2), false));
        break;
      case 2:  // two backwards of one graph
        actions.push_back(forward());
        if (one_in(2)) actions.push_back(backward(false, true));
        actions.push_back(backward(false, false));
        break;
      default:
        for (int64_t part = 0; part < parts; ++part) {
          if (alone && part == 0) actions.push_back(open_no_sync());
          if (alone && part + 1 == parts) actions.push_back(close_no_sync());
          actions.push_back(forward());
          actions.push_back(backward(false, false));
        }
    }
    if (one_in(3)) actions.push_back(clip());
    if (!one_in(8)) actions.push_back(step());
    return actions;
  }

  Action forward() {
    const int batch = static_cast<int>(pick(12));
    return {"losses.push_back(loss(" + std::to_string(batch) + "))", [batch](Player& player) {
              player.losses.push_back(player.run.loss(batch));
              player.run.note(player.losses.back().detach());
            }};
  }

  static Action backward(bool first, bool retains) {
    return {std::string(first ? "losses.front()" : "losses.back()") + ".backward(" +
                (retains ? "retain_graph)" : "); erase it"),
            [first, retains](Player& player) {
              if (player.losses.empty()) return;
              const auto at = first ? player.losses.begin() : player.losses.end() - 1;
              const at::Tensor loss = *at;
              if (!retains) player.losses.erase(at);
              player.backward(loss, retains);
            }};
  }

  static Action backward_of_sum() {
    return {"sum(losses).backward(); losses.clear()", [](Player& player) {
              if (player.losses.empty()) return;
              const auto losses = std::exchange(player.losses, {});
              player.backward(torch::stack(losses).sum());
            }};
  }

  Action zero_grad() {
    const bool to_none = !one_in(3);
    const std::string argument = to_none ? "()" : "(false)";
    switch (pick(5)) {
      case 0:
        return {"model->zero_grad" + argument, [=](Player& player) { player.run.model->zero_grad(to_none); }};
      case 1:
        return {"wrapper.zero_grad" + argument, [=](Player& player) { player.run.zero_grad(to_none); }};
      default:
        return {"optimizer.zero_grad" + argument, [=](Player& player) { player.run.optimizer().zero_grad(to_none); }};
    }
  }

  static Action open_no_sync() {
    return {"alone = no_sync()", [](Player& player) {
              if (!player.alone) player.alone = std::make_unique<ScopeExit>(player.run.no_sync());
            }};
  }
  static Action close_no_sync() {
    return {"alone.reset()", [](Player& player) { player.alone.reset(); }};
  }

  static Action step() {
    return {"optimizer.step()", [](Player& player) {
              if (player.steps_own_sums || !player.has_own_sums) player.run.optimizer().step();
            }};
  }
  static Action clip() {
    return {"note(clip_grad_norm_(0.5))",
            [](Player& player) { player.run.notes.push_back(player.run.clip_grad_norm_(0.5)); }};
  }

  // Draws an extra action, for any point of an iteration.
  Action draw_extra() {
    using Draw = Action (Drawer::*)();
    static constexpr Draw kAll[] = {&Drawer::evaluation,
                                    &Drawer::evaluation,
                                    &Drawer::evaluation_with_a_graph,
                                    &Drawer::write_values,
                                    &Drawer::write_values,
                                    &Drawer::load_values,
                                    &Drawer::new_data,
                                    &Drawer::freeze,
                                    &Drawer::freeze,
                                    &Drawer::other_rate,
                                    &Drawer::average,
                                    &Drawer::swap_average,
                                    &Drawer::failing_forward,
                                    &Drawer::failing_backward,
                                    &Drawer::no_sync_edge,
                                    &Drawer::any_zero_grad,
                                    &Drawer::any_step,
                                    &Drawer::save,
                                    &Drawer::load,
                                    &Drawer::summon,
                                    &Drawer::scale_gradients,
                                    &Drawer::optimizer_through_torch,
                                    &Drawer::closure,
                                    &Drawer::gradients_of_inputs,
                                    &Drawer::gradients_of_parameters,
                                    &Drawer::penalty_on_slope,
                                    &Drawer::forget,
                                    &Drawer::skip,
                                    &Drawer::look_at_state,
                                    &Drawer::clear_layer,
                                    &Drawer::zeros_by_hand,
                                    &Drawer::vector_to_values,
                                    &Drawer::forget_state,
                                    &Drawer::thread,
                                    &Drawer::decay};
    return (this->*kAll[pick(std::size(kAll))])();
  }

  Action evaluation() {
    const int batch = static_cast<int>(pick(12)), mode = static_cast<int>(pick(4));
    static const char* const kModes[] = {"NoGradGuard; ", "NoGradGuard; model->eval(); ", "InferenceMode; ",
                                         "NoGradGuard; past the wrapper; "};
    return {std::string(kModes[mode]) + "note(loss(" + std::to_string(batch) + "))", [batch, mode](Player& player) {
              const torch::NoGradGuard no_grad;
              const c10::InferenceMode inference(mode == 2);
              if (mode == 1 || mode == 3) player.run.model->eval();
              const at::Tensor x = player.run.x(batch), y = player.run.y(batch);
              const at::Tensor out = mode == 3 ? player.run.model->forward(x) : player.run(x);
              player.run.note(torch::mse_loss(out, y));
              player.run.model->train();
            }};
  }
  Action evaluation_with_a_graph() {
    const int batch = static_cast<int>(pick(12));
    return {"note(loss(" + std::to_string(batch) + ")), with a graph that is thrown away",
            [batch](Player& player) { player.run.note(player.run.loss(batch).detach()); }};
  }

  Action write_values() {
    switch (pick(3)) {
      case 0:
        return {"for (p : wrapper.parameters()) p.data().mul_(0.9)", [](Player& player) {
                  for (auto& parameter : player.run.parameters()) parameter.data().mul_(0.9);
                }};
      case 1:
        return {"NoGradGuard; for (p : wrapper.parameters()) p.mul_(0.9)", [](Player& player) {
                  const torch::NoGradGuard no_grad;
                  for (auto& parameter : player.run.parameters()) parameter.mul_(0.9);
                }};
      default: {
        const size_t index = pick(50);
        return {"NoGradGuard; wrapper.parameters()[" + std::to_string(index) + " % n].clamp_(-0.3, 0.3)",
                [index](Player& player) {
                  const torch::NoGradGuard no_grad;
                  auto parameters = player.run.parameters();
                  parameters[index % parameters.size()].clamp_(-0.3, 0.3);
                }};
      }
    }
  }

  Action load_values() {
    const uint64_t values = 50 + pick(5);
    return {"torch::load(model, of seed " + std::to_string(values) + ")", [values](Player& player) {
              const Model fresh = drawn_net(player.tree, values);
              fresh->to(player.run.device);
              std::stringstream file;
              torch::save(std::static_pointer_cast<torch::nn::Module>(fresh), file);
              auto model = std::static_pointer_cast<torch::nn::Module>(player.run.model);
              torch::load(model, file);
              player.adopt_new_data();
            }};
  }

  Action new_data() {
    const size_t index = pick(50);
    return {"p = model->parameters()[" + std::to_string(index) + " % n]; p.set_data(p.detach() * 0.8)",
            [index](Player& player) {
              at::Tensor parameter = player.module_parameter(index);
              parameter.set_data(parameter.detach() * 0.8);
              player.adopt_new_data();
            }};
  }

  Action freeze() {
    const size_t index = pick(50);
    const bool thaws = one_in(3), through_wrapper = one_in(3);
    return {std::string(through_wrapper ? "wrapper.parameters()[" : "model->parameters()[") + std::to_string(index) +
                " % n].requires_grad_(" + (thaws ? "true)" : "false)"),
            [=](Player& player) {
              auto parameters = through_wrapper ? player.run.parameters() : player.module_parameters();
              parameters[index % parameters.size()].requires_grad_(thaws);
            }};
  }

  Action other_rate() {
    const double factor = 0.5 + 0.25 * static_cast<double>(pick(4));
    return {"lr *= " + std::to_string(factor), [factor](Player& player) {
              for (auto& group : player.run.optimizer().param_groups())
                group.options().set_lr(group.options().get_lr() * factor);
            }};
  }

  Action average() {
    return {"average = (average + wrapper.parameters()) / 2", [](Player& player) {
              const torch::NoGradGuard no_grad;
              const auto parameters = player.run.parameters();
              if (player.average.empty())
                for (const auto& parameter : parameters) player.average.push_back(parameter.detach().clone());
              for (size_t i = 0; i < parameters.size(); ++i) player.average[i].lerp_(parameters[i].detach(), 0.5);
            }};
  }
  Action swap_average() {
    return {"swap(average, wrapper.parameters().data())", [](Player& player) {
              if (player.average.empty()) return;
              auto parameters = player.run.parameters();
              for (size_t i = 0; i < parameters.size(); ++i) {
                const at::Tensor before = parameters[i].detach().clone();
                parameters[i].data().copy_(player.average[i]);
                player.average[i].copy_(before);
              }
            }};
  }

  Action failing_forward() {
    const int batch = static_cast<int>(pick(12));
    return {"try { loss(" + std::to_string(batch) + ") that throws half way }", [batch](Player& player) {
              player.net().in_forward = [] { throw UsersError(); };
              expect_own_error([&] { player.run.loss(batch); });
              player.net().in_forward = nullptr;
            }};
  }
  Action failing_backward() {
    const int batch = static_cast<int>(pick(12));
    const int then = static_cast<int>(pick(4));
    static const char* const kThen[] = {"", "; optimizer.zero_grad()", "; model->zero_grad()", "; wrapper.zero_grad()"};
    return {"try { loss(" + std::to_string(batch) + ").backward() that throws half way }" + kThen[then],
            [batch, then](Player& player) {
              player.net().hook = [](const at::Tensor&) -> at::Tensor { throw UsersError(); };
              const at::Tensor loss = player.run.loss(batch);
              player.net().hook = nullptr;
              expect_own_error([&] { player.backward(loss); });
              if (then == 1) player.run.optimizer().zero_grad();
              if (then == 2) player.run.model->zero_grad();
              if (then == 3) player.run.zero_grad();
            }};
  }

  Action no_sync_edge() { return one_in(2) ? open_no_sync() : close_no_sync(); }
  Action any_zero_grad() { return zero_grad(); }
  Action any_step() { return step(); }

  Action save() {
    return {"save_checkpoint()", [](Player& player) {
              player.is_saved = true;
              if (ModelShards* shards = player.run.shards()) {
                save_checkpoint(player.name, *shards, player.run.optimizer());
                return;
              }
              player.saved_values = player.run.state();
              if (auto* sharded = dynamic_cast<ShardedOptimizer*>(&player.run.optimizer())) {
                sharded->consolidate_state_dict(-1);
                player.saved_state = sharded->state_dict();
              } else {
                player.saved_optimizer = snapshot(player.run.optimizer());
              }
            }};
  }
  Action load() {
    return {"load_checkpoint()", [](Player& player) {
              if (!player.is_saved) return;
              if (ModelShards* shards = player.run.shards()) {
                load_checkpoint(player.name, *shards, player.run.optimizer());
                return;
              }
              const torch::NoGradGuard no_grad;
              for (auto& entry : player.run.model->named_parameters())
                entry.value().copy_(player.saved_values[entry.key()]);
              for (auto& entry : player.run.model->named_buffers())
                entry.value().copy_(player.saved_values[entry.key()]);
              if (player.saved_state) {
                dynamic_cast<ShardedOptimizer&>(player.run.optimizer()).load_state_dict(*player.saved_state);
              } else {
                std::istringstream file(player.saved_optimizer);
                player.run.optimizer().state().clear();  // torch::load() keeps values that the file lacks
                torch::load(player.run.optimizer(), file);
              }
            }};
  }

  Action summon() {
    const bool writes_back = !one_in(3), looks = one_in(3);
    return {std::string("summon_full_params(") + (writes_back ? "" : "writeback = false") + "); " +
                (looks ? "note(the parameters' squares)" : "NoGradGuard; for (p : model->parameters()) p.mul_(0.9)"),
            [=](Player& player) {
              std::unique_ptr<ScopeExit> scope;
              if (auto* fsdp = player.run.fsdp())
                scope = std::make_unique<ScopeExit>(fsdp->summon_full_params({.writeback = writes_back}));
              const torch::NoGradGuard no_grad;
              for (auto& parameter : player.module_parameters()) {
                if (looks) player.run.note(parameter.square().sum());
                if (!looks && (writes_back || scope)) parameter.mul_(0.9);
              }
            }};
  }

  Action scale_gradients() {
    const bool replaces = one_in(2);
    return {std::string("for (p : wrapper.parameters()) p.grad() ") + (replaces ? "= p.grad() * 0.5" : ".mul_(0.5)"),
            [=](Player& player) {
              for (auto& parameter : player.run.parameters()) {
                if (!parameter.grad().defined()) continue;
                if (replaces)
                  parameter.mutable_grad() = parameter.grad() * 0.5;
                else
                  parameter.mutable_grad().mul_(0.5);
              }
            }};
  }

  Action optimizer_through_torch() {
    return {"torch::save(optimizer); torch::load(optimizer)", [](Player& player) {
              if (auto* sharded = dynamic_cast<ShardedOptimizer*>(&player.run.optimizer()))
                sharded->consolidate_state_dict(-1);
              std::istringstream file(snapshot(player.run.optimizer()));
              torch::load(player.run.optimizer(), file);
            }};
  }

  Action closure() {
    const int batch = static_cast<int>(pick(12));
    return {"optimizer.step([] { optimizer.zero_grad(); loss(" + std::to_string(batch) + ").backward() })",
            [batch](Player& player) {
              if (!player.steps_own_sums && player.alone) return;
              player.run.note(player.run.optimizer().step([&] {
                player.run.optimizer().zero_grad();
                at::Tensor loss = player.run.loss(batch);
                player.backward(loss);
                return loss.detach();
              }));
            }};
  }

  Action gradients_of_inputs() {
    const int batch = static_cast<int>(pick(12));
    return {"note(torch::autograd::grad(loss(" + std::to_string(batch) + "), x))", [batch](Player& player) {
              const at::Tensor x = player.run.x(batch).requires_grad_();
              const at::Tensor loss = torch::mse_loss(player.run(x), player.run.y(batch));
              const at::Tensor gradient = torch::autograd::grad({loss}, {x})[0];
              player.run.note(gradient.sum());
            }};
  }

  Action gradients_of_parameters() {
    const int batch = static_cast<int>(pick(12));
    return {"note(torch::autograd::grad(loss(" + std::to_string(batch) + "), model->parameters()))",
            [batch](Player& player) {
              const auto all = player.module_parameters();
              std::vector<at::Tensor> trained;
              std::ranges::copy_if(all, std::back_inserter(trained),
                                   [](const at::Tensor& parameter) { return parameter.requires_grad(); });
              const at::Tensor loss = player.run.loss(batch);
              if (trained.empty() || !loss.requires_grad()) return;
              for (const auto& gradient : torch::autograd::grad({loss}, trained, {}, std::nullopt, false, true))
                if (gradient.defined()) player.run.note(gradient.sum());
            }};
  }
  Action penalty_on_slope() {
    const int batch = static_cast<int>(pick(12));
    return {"losses.push_back(the mean square of torch::autograd::grad(sum of out(" + std::to_string(batch) + "), x))",
            [batch](Player& player) {
              const at::Tensor x = player.run.x(batch).requires_grad_();
              const at::Tensor slope = torch::autograd::grad({player.run(x).sum()}, {x}, {}, true, true)[0];
              player.losses.push_back(slope.square().mean());
            }};
  }

  Action forget() {
    return {"losses.clear()", [](Player& player) { player.losses.clear(); }};
  }
  Action skip() {
    const bool skips = one_in(2);
    return {std::string("model->skips_second = ") + (skips ? "true" : "false"),
            [skips](Player& player) { player.net().skips_second = skips; }};
  }
  Action look_at_state() {
    return {"note(full_state_dict())", [](Player& player) { player.run.note_state(player.run); }};
  }
  Action clear_layer() {
    const bool to_none = one_in(2);
    return {std::string("model->first->zero_grad(") + (to_none ? ")" : "false)"),
            [to_none](Player& player) { player.net().first->zero_grad(to_none); }};
  }

  Action zeros_by_hand() {
    return {"for (p : wrapper.parameters()) if (p.grad().defined()) p.grad().zero_()", [](Player& player) {
              for (auto& parameter : player.run.parameters())
                if (parameter.grad().defined()) parameter.mutable_grad().zero_();
            }};
  }
  Action vector_to_values() {
    return {"vector_to_parameters(0.9 * parameters_to_vector(model->parameters()), model->parameters())",
            [](Player& player) {
              const torch::NoGradGuard no_grad;
              const auto parameters = player.module_parameters();
              torch::nn::utils::vector_to_parameters(0.9 * torch::nn::utils::parameters_to_vector(parameters),
                                                     parameters);
              player.adopt_new_data();
            }};
  }
  Action forget_state() {
    return {"optimizer.state().clear()", [](Player& player) { player.run.optimizer().state().clear(); }};
  }
  Action thread() {
    return {"std::thread: losses.back().backward(); erase it", [](Player& player) {
              if (player.losses.empty()) return;
              const at::Tensor loss = player.losses.back();
              player.losses.pop_back();
              std::async(std::launch::async, [&] {
                at::set_num_threads(1);
                player.backward(loss);
              }).get();
            }};
  }
  // A penalty on the module's own parameters.
  Action decay() {
    return {"losses.push_back(loss(0) + 0.01 * sum of squares of model->parameters())", [](Player& player) {
              at::Tensor sum = torch::zeros({}, at::kDouble).to(player.run.device);
              for (const auto& parameter : player.module_parameters()) sum = sum + parameter.square().sum();
              player.losses.push_back(0.01 * sum + player.run.loss(0));
            }};
  }

  std::mt19937_64 random_;
};

}  // namespace

DrawnProgram draw_program(uint64_t seed) { return Drawer(seed).draw(seed); }

std::string text_of(const DrawnProgram& program) {
  static const char* const kOptimizers[] = {"SGD(0.1)", "SGD(0.1, momentum 0.9)", "Adam(1e-2)"};
  std::ostringstream text;
  text << "program " << program.seed << ", tree " << program.tree << ", "
       << kOptimizers[static_cast<int>(program.optim)] << (program.same_data ? ", all rows on every rank" : "") << "\n";
  for (const Action& action : program.actions)
    text << "  " << (action.model == 1 ? "other model: " : "") << action.text << "\n";
  return text.str();
}

Play play_of(const DrawnProgram& program) {
  return {.expect = Expect::kEither,
          .model = [tree = program.tree] { return drawn_net(tree, 1); },
          .same_data = program.same_data,
          .unused = true,
          // Norms of equal features, such as the zeros of a ReLU, amplify rounding.
          .rounding = 1e3,
          .optimizers = {program.optim}};
}

Loop loop_of(const DrawnProgram& program) {
  return [program](Trainer& run) {
    const std::string name = "memory://drawn/" + std::to_string(program.seed) + "/";
    Player first(run, name + "0", program);
    std::unique_ptr<Trainer> other;
    std::unique_ptr<Player> second;
    for (const Action& action : program.actions) {
      if (action.model == 1 && !second) {
        other = run.another(drawn_net(program.tree, 2));
        other->same_data = run.same_data;
        second = std::make_unique<Player>(*other, name + "1", program);
      }
      action.run(action.model == 0 ? first : *second);
    }
    first.alone.reset();
    run.loss(0);  // where some mistakes are noticed
    if (second) {
      second->alone.reset();
      other->loss(0);
      for (double each : other->notes) run.notes.push_back(each);
      run.note_state(*other);
    }
  };
}

}  // namespace tessera::loops
