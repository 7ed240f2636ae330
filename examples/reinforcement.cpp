// A policy gradient (REINFORCE with a baseline) on a cart with a pole, whose ranks collect unequal data. Each rank
// plays its own episodes, of unequal lengths, so ranks have different numbers of time steps and of batches.
//
//   reinforcement [ITERATIONS]      40 by default
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kEpisodes = 8, kMaxLength = 200, kBatch = 256;  // kEpisodes: per rank and iteration
constexpr float kDiscount = 0.98F;

// The cart-pole problem of Barto, Sutton and Anderson, with the constants of OpenAI Gym's CartPole-v0.
struct CartPole {
  explicit CartPole(std::mt19937& random) {
    std::uniform_real_distribution<float> small(-0.05F, 0.05F);
    for (float& value : state) value = small(random);
  }
  // Pushes the cart to the right or the left. Returns whether the pole is still upright.
  bool step(bool to_the_right) {
    auto& [x, x_speed, angle, angle_speed] = state;
    const float force = to_the_right ? 10.0F : -10.0F, sine = std::sin(angle), cosine = std::cos(angle);
    const float push = (force + 0.05F * angle_speed * angle_speed * sine) / 1.1F;
    const float turn = (9.8F * sine - cosine * push) / (0.5F * (4.0F / 3.0F - 0.1F * cosine * cosine / 1.1F));
    x += 0.02F * x_speed;
    x_speed += 0.02F * (push - 0.05F * turn * cosine / 1.1F);
    angle += 0.02F * angle_speed;
    angle_speed += 0.02F * turn;
    return std::abs(x) < 2.4F && std::abs(angle) < 0.2095F;
  }
  std::array<float, 4> state{};
};

struct PolicyImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 64));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(64, 2));
  at::Tensor forward(const at::Tensor& states) { return last(torch::tanh(first(states))).log_softmax(1); }
};
TORCH_MODULE(Policy);

// The time steps of a rank's episodes: states [n, 4], actions [n, 1], returns [n].
struct Experience {
  at::Tensor states, actions, returns;
};

// Plays episodes on this rank alone. Stages below 3 run the module without collectives, so ranks may take different
// numbers of steps. In stage 3, a program must hold summon_full_params() during this call.
Experience play(Policy& policy, std::mt19937& random) {
  const torch::NoGradGuard no_grad;
  std::vector<float> states, returns;
  std::vector<int64_t> actions;
  for (int64_t episode = 0; episode < kEpisodes; ++episode) {
    CartPole cart(random);
    const size_t begin = actions.size();
    bool stands = true;
    while (stands && actions.size() - begin < kMaxLength) {
      const auto odds = policy->forward(torch::from_blob(cart.state.data(), {1, 4})).exp();
      states.insert(states.end(), cart.state.begin(), cart.state.end());
      actions.push_back(std::bernoulli_distribution(odds[0][1].item<double>())(random) ? 1 : 0);
      stands = cart.step(actions.back() == 1);
    }
    returns.resize(actions.size());
    float sum = 0.0F;
    for (size_t i = actions.size(); i-- > begin;) returns[i] = sum = 1.0F + kDiscount * sum;
  }
  return {torch::tensor(states).view({-1, 4}), torch::tensor(actions).view({-1, 1}), torch::tensor(returns)};
}

void train(int64_t iterations, const std::shared_ptr<tessera::Communicator>& comm) {
  torch::manual_seed(1);
  auto model = tessera::zero(Policy(), torch::optim::AdamOptions(1e-2), comm, {.stage = 2});
  auto policy = model.module();
  std::mt19937 random(static_cast<unsigned>(comm->rank()));

  for (int64_t iteration = 1; iteration <= iterations; ++iteration) {
    const Experience own = play(policy, random);
    const int64_t numel = own.returns.numel();
    // The baseline is the mean, and the scale the standard deviation, of the returns of all ranks.
    auto sums =
        torch::stack({torch::ones_like(own.returns), own.returns, own.returns.square()}, 1).to(torch::kFloat64).sum(0);
    sums = tessera::reduce_to_host(*comm, sums, tessera::ReduceOp::kSum, "the returns");
    const double mean = (sums[1] / sums[0]).item<double>();
    const double deviation = std::sqrt((sums[2] / sums[0]).item<double>() - mean * mean) + 1e-6;
    const auto advantages = (own.returns - mean) / deviation;

    // Trains until no rank has a batch left. Losses are sums over a rank's rows, and the sum of gradients is divided by
    // the number of rows of all ranks. So a rank without rows contributes nothing.
    for (int64_t begin = 0; tessera::ranks_with_data(*comm, begin < numel) > 0; begin += kBatch) {
      const int64_t first = std::min(begin, numel), rows = std::min(kBatch, numel - first);
      model.divide_gradients_by_sum(rows);
      const auto odds = model(own.states.narrow(0, first, rows)).gather(1, own.actions.narrow(0, first, rows));
      model.zero_grad();
      (-odds.squeeze(1) * advantages.narrow(0, first, rows)).sum().backward();
      model.clip_grad_norm_(1.0);
      model.step();
    }
    if (comm->rank() == 0 && (iteration % 10 == 0 || iteration == iterations))
      std::cout << "iteration " << iteration << ": an episode takes "
                << sums[0].item<double>() / static_cast<double>(kEpisodes * comm->size()) << " steps" << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string number = argc > 1 ? argv[1] : "40";
  const int64_t iterations = std::strtoll(number.c_str(), nullptr, 10);
  if (argc > 2 || iterations < 1 || std::to_string(iterations) != number)
    return std::cerr << "usage: reinforcement [ITERATIONS]\n", 2;
  if (!tessera::launched()) return tessera::spawn_local(2, argc, argv);
  return tessera::run_main([&] { train(iterations, tessera::init()); });
}
