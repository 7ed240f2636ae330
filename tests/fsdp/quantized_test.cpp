// Frozen weights in 4 and 8 bit with adapters: formats, layers, and sharded against unsharded training.
#include <array>
#include <optional>
#include <sstream>

#include "core/layout/flat_layout.h"
#include "optim/quantized/weight_format.h"
#include "tests/support/matrix.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::quantized_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr WeightFormat kFormats[] = {WeightFormat::kFull, WeightFormat::kNf4, WeightFormat::kNf4Double,
                                     WeightFormat::kInt8};

// Linear layers as a member, in a Sequential and in a ModuleList, and one that is used twice.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : in(register_module("in", torch::nn::Linear(8, 33))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({33})))),
        body(register_module("body", torch::nn::Sequential(torch::nn::Linear(33, 33), torch::nn::GELU()))),
        list(register_module("list",
                             torch::nn::ModuleList(torch::nn::Linear(torch::nn::LinearOptions(33, 8).bias(false))))) {}
  at::Tensor forward(at::Tensor x) {
    x = norm(in(x));
    x = body->forward(body->forward(x));
    return list[0]->as<torch::nn::LinearImpl>()->forward(x);
  }
  torch::nn::Linear in;
  torch::nn::LayerNorm norm;
  torch::nn::Sequential body;
  torch::nn::ModuleList list;
};
TORCH_MODULE(Net);

Net plain_net() {
  return seeded(7, [] { return Net(); });
}
Net net_of(WeightFormat format, int64_t rank = 3) {
  Net net = plain_net();
  seeded(8, [&] { return quantize_linears(*net, {.format = format, .lora = {.rank = rank}}); });
  return net;
}

template <class Model>
at::Tensor loss_of(Model& model, int step, int rank) {
  const at::Tensor x = seeded(100 * step + rank, [] { return torch::randn({4, 8}); });
  return (call(model, x) - x).square().mean();
}

// ---- formats ------------------------------------------------------------------------------------

TEST(WeightFormats, KeepTheirBoundsAndTheirBytes) {
  const at::Tensor weight = seeded(1, [] { return torch::randn({37, 51}); });  // the last block is not full
  const int64_t numel = weight.numel();
  const at::Tensor rows = torch::constant_pad_nd(weight.flatten(), {0, 64 - numel % 64}).view({-1, 64});
  const at::Tensor largest = rows.abs().amax(1, true).expand_as(rows).flatten().narrow(0, 0, numel);
  // Half the widest step of the table, plus the error of doubly quantized scales.
  for (const auto& [format, bound] : {std::pair{WeightFormat::kNf4, 0.1519}, std::pair{WeightFormat::kNf4Double, 0.17},
                                      std::pair{WeightFormat::kInt8, 0.5001 / 127}}) {
    const at::Tensor bytes = encoded(format, weight);
    ASSERT_EQ(bytes.numel(), encoded_bytes(format, numel));
    const at::Tensor back = decoded(format, bytes, numel, at::kFloat);
    EXPECT_TRUE(((back - weight.flatten()).abs() <= bound * largest).all().item<bool>()) << static_cast<int>(format);
    EXPECT_TRUE(torch::equal(decoded(format, bytes, numel, at::kBFloat16), back.to(at::kBFloat16)));
    EXPECT_TRUE(decoded(format, encoded(format, torch::zeros({5})), 5, at::kFloat).eq(0).all().item<bool>());
  }
  EXPECT_EQ(encoded_bytes(WeightFormat::kNf4, 1 << 20), (1 << 19) + (1 << 16));
  EXPECT_EQ(encoded_bytes(WeightFormat::kNf4Double, 1 << 20), (1 << 19) + (1 << 14) + 4 * 64 + 16);
  EXPECT_EQ(encoded_bytes(WeightFormat::kInt8, 1 << 20), (1 << 20) + (1 << 16));
  expect_contains(error_of<std::invalid_argument>([] { encoded(WeightFormat::kNf4, torch::full({4}, INFINITY)); }),
                  "infinite or NaN");
}

// Codes are bitsandbytes' own: the first element is in the high bits.
TEST(WeightFormats, PackAsBitsandbytes) {
  const at::Tensor values = torch::tensor({-1.0, 1.0, 0.0, 0.07958029955625534, 0.04, 0.0397}, at::kFloat) * 2;
  const at::Tensor bytes = encoded(WeightFormat::kNf4, values);
  EXPECT_EQ(bytes[0].item<int>(), 0x0f);
  EXPECT_EQ(bytes[1].item<int>(), 0x78);
  EXPECT_EQ(bytes[2].item<int>(), 0x87);
  EXPECT_EQ(bytes.narrow(0, 32, 4).view(at::kFloat).item<float>(), 2.0F);
}

// ---- layers -------------------------------------------------------------------------------------

TEST(QuantizeLinears, ComputesWithTheValues) {
  for (const WeightFormat format : kFormats) {
    Net net = net_of(format), decoded_net = plain_net();
    const auto state = dequantized_state(*net, net->named_parameters(), /*with_adapters=*/false);
    at::NoGradGuard no_grad;
    for (auto& entry : decoded_net->named_parameters()) entry.value().copy_(state[entry.key()]);
    c10::AutoGradMode with_grad(true);
    at::Tensor x = torch::ones({5, 8}).set_requires_grad(true), y = x.detach().clone().set_requires_grad(true);
    const at::Tensor ours = net(x), theirs = decoded_net(y);
    EXPECT_TRUE(torch::allclose(ours, theirs, 1e-5, 1e-6));
    ours.square().sum().backward();
    theirs.square().sum().backward();
    EXPECT_TRUE(torch::allclose(x.grad(), y.grad(), 1e-4, 1e-5));
    EXPECT_FALSE(net->in->weight.requires_grad());
    EXPECT_EQ(net->in->weight.sizes(), at::IntArrayRef({33, 8}));
    EXPECT_EQ(net->named_parameters()["body.0.weight"].dtype(), format == WeightFormat::kFull ? at::kFloat : at::kByte);
    if (format != WeightFormat::kFull) {
      EXPECT_EQ(x.grad_fn(), nullptr);
    }
  }
}

// Indexing passes its indices in a list.
TEST(QuantizeLinears, GivesItsRows) {
  for (const WeightFormat format : {WeightFormat::kNf4, WeightFormat::kInt8}) {
    Net net = net_of(format, /*rank=*/0);
    const at::Tensor rows = torch::tensor({7, 0});
    const auto state = dequantized_state(*net, net->named_parameters(), /*with_adapters=*/false);
    EXPECT_TRUE(torch::equal(net->in->weight.index({rows}), state["in.weight"].index({rows})));
  }
}

// A decoded weight is freed between forward and backward, and double backward is right.
TEST(QuantizeLinears, HasSecondDerivativesOfItsInputs) {
  Net net = net_of(WeightFormat::kNf4);
  at::Tensor x = torch::ones({1, 8}, at::kFloat).set_requires_grad(true);
  const at::Tensor first = torch::autograd::grad({net(x).pow(3).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
  const at::Tensor second = torch::autograd::grad({first.square().sum()}, {x})[0];
  auto slope = [&](double by) {
    at::Tensor moved = x.detach().clone();
    moved[0][2] += by;
    moved.set_requires_grad(true);
    return torch::autograd::grad({net(moved).pow(3).sum()}, {moved})[0].square().sum().item<double>();
  };
  EXPECT_NEAR(second[0][2].item<double>(), (slope(1e-2) - slope(-1e-2)) / 2e-2,
              0.02 * std::abs(second[0][2].item<double>()) + 1e-2);
}

TEST(QuantizeLinears, MergesAndTakesOutAgain) {
  Net net = net_of(WeightFormat::kNf4Double);
  {
    at::NoGradGuard no_grad;
    for (auto& entry : net->named_parameters())
      if (entry.key().ends_with("lora_b")) entry.value().fill_(0.02);
  }
  net->eval();
  const at::Tensor x = torch::ones({5, 8}), before = net(x);
  merge_adapters(*net);
  EXPECT_TRUE(torch::allclose(net(x), before, 1e-4, 1e-5));
  net->train();
  expect_contains(error_of<std::logic_error>([&] { net(x); }), "unmerge_adapters() first");
  unmerge_adapters(*net);
  EXPECT_TRUE(torch::equal(net(x), before));
  Net ordinary = plain_net();
  const auto state = dequantized_state(*net, net->named_parameters());
  at::NoGradGuard no_grad;
  for (auto& entry : ordinary->named_parameters()) entry.value().copy_(state[entry.key()]);
  EXPECT_EQ(state.size(), ordinary->named_parameters().size());
  EXPECT_TRUE(torch::allclose(ordinary(x), before, 1e-4, 1e-5));
}

// torch::save and torch::load store the encoded bytes; loading a file of full weights throws.
TEST(QuantizeLinears, AreSavedAndLoadedByTorch) {
  auto plain = [] {
    return seeded(7, [] { return torch::nn::Sequential(torch::nn::Linear(8, 33), torch::nn::Linear(33, 8)); });
  };
  auto with_rank = [&](int64_t rank) {
    auto net = plain();
    quantize_linears(*net, {.format = WeightFormat::kNf4, .lora = {.rank = rank}});
    return net;
  };
  const at::Tensor x = torch::ones({5, 8});
  auto saved = with_rank(3), loaded = with_rank(3), without_adapters = with_rank(0);
  at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : saved->parameters())
    if (parameter.is_floating_point()) parameter.add_(0.1);
  std::stringstream quantized_file, plain_file;
  torch::save(saved, quantized_file);
  EXPECT_FALSE(torch::equal(loaded->forward(x), saved->forward(x)));
  torch::load(loaded, quantized_file);
  EXPECT_TRUE(torch::equal(loaded->forward(x), saved->forward(x)));

  torch::save(plain(), plain_file);
  torch::load(without_adapters, plain_file);
  expect_contains(error_of<std::invalid_argument>([&] { without_adapters->forward(x); }),
                  "'0.weight': a quantized weight of");
}

TEST(QuantizeLinears, RefusesByName) {
  auto refused = [](torch::nn::Module& module, const QuantizeOptions& options = {}) {
    return error_of<std::invalid_argument>([&] { quantize_linears(module, options); });
  };
  Net net = plain_net();
  expect_contains(refused(*net, {.which = wrap_modules<torch::nn::Conv2dImpl>()}), "no Linear layer");
  expect_contains(refused(*net, {.lora = {.rank = -1}}), "lora.rank is -1, expected 0 or more");
  expect_contains(refused(*net, {.format = WeightFormat::kFull}), "changes nothing");
  const auto names = quantize_linears(
      *net, {.which = wrap_if([](const std::string& fqn, const torch::nn::Module&) { return fqn == "body.0"; })});
  EXPECT_EQ(names, std::vector<std::string>{"body.0"});
  expect_contains(refused(*net), "'body.0.weight' is quantized already");

  Net tied = plain_net();
  tied->register_parameter("again", tied->in->weight);
  expect_contains(refused(*tied), "'in.weight' is tied, registered under 2 names");

  Net infinite = plain_net();
  {
    torch::NoGradGuard no_grad;
    infinite->parameters().back().fill_(1);
    for (const auto& entry : infinite->named_parameters())
      if (entry.key().ends_with("weight")) entry.value().view({-1})[1].fill_(entry.key() == "in.weight" ? 0 : NAN);
  }
  expect_contains(refused(*infinite), "has elements that are infinite or NaN");
  for (const auto& entry : infinite->named_parameters()) EXPECT_TRUE(entry.value().requires_grad()) << entry.key();
  EXPECT_FALSE(infinite->named_parameters().contains("in.lora_a"));

  Net converted = net_of(WeightFormat::kNf4);
  expect_contains(error_of<std::logic_error>([&] { converted->in->weight.zero_(); }), "which is quantized");
  expect_contains(error_of<std::logic_error>([&] { converted->in->weight.sum(); }), "has an adapter");
  converted->to(at::kBFloat16);
  expect_contains(error_of<std::invalid_argument>([&] { converted(torch::ones({1, 8}, at::kBFloat16)); }),
                  "'in.weight': a quantized weight of 264 elements in");
}

// ---- sharded ------------------------------------------------------------------------------------

template <class Wrapped>
void train_and_compare(Wrapped& model, torch::optim::Optimizer& optimizer, Net& reference, int world, int rank,
                       const std::string& where, double tolerance = 0) {
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : reference->parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  torch::optim::AdamW whole(trained, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    whole.zero_grad();
    const at::Tensor loss = loss_of(model, step, rank);
    EXPECT_TRUE(torch::allclose(loss.detach(), loss_of(reference, step, rank).detach(), tolerance, tolerance))
        << where << ", step " << step;
    loss.backward();
    reference_backward(reference, world, [&](int part) { return loss_of(reference, step, part); });
    optimizer.step();
    whole.step();
  }
}

FsdpOptions fsdp_options(int ranks_per_copy = 0) {
  FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
  options.hybrid.ranks_per_copy = ranks_per_copy;
  return options;
}

TEST(QuantizedSharding, HasTheBitsOfOneProcess) {
  for (const WeightFormat format : kFormats) {
    for (const int world : fewer_on_devices<std::vector<int>>({1, 2, 3, 4}, {2})) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        const auto options = torch::optim::AdamWOptions(1e-2);
        const std::string where = c10::str("format ", static_cast<int>(format), ", world ", world);
        {
          Net reference = net_of(format), net = net_of(format);
          DistributedDataParallel ddp(net, comm);
          torch::optim::AdamW optimizer(net->parameters(), options);
          train_and_compare(ddp, optimizer, reference, world, comm->rank(), "DDP, " + where);
        }
        {
          Net reference = net_of(format), net = net_of(format);
          OSS<torch::optim::AdamW> optimizer(net->parameters(), options, comm);
          ShardedDataParallel sdp(net, optimizer, comm);
          train_and_compare(sdp, optimizer, reference, world, comm->rank(), "SDP, " + where);
        }
        for (const int ranks_per_copy : {0, 2}) {
          if (ranks_per_copy > 0 && world != 4) continue;
          Net reference = net_of(format);
          FullyShardedDataParallel fsdp(net_of(format), comm, fsdp_options(ranks_per_copy));
          torch::optim::AdamW optimizer(fsdp.parameters(), options);
          // Copies of the model change the order of additions.
          train_and_compare(fsdp, optimizer, reference, world, comm->rank(), "FSDP, " + where,
                            ranks_per_copy == 0 ? 0 : 1e-5);
          if (ranks_per_copy == 0) expect_same_parameters(fsdp, *reference, where);
        }
      });
    }
  }
}

// A deferred model gets the values of an ordinary model of the same seed.
TEST(QuantizedSharding, OfDeferredModelsIsTheSame) {
  for (const WeightFormat format : kFormats) {
    const auto build = [&] {
      Net net;
      quantize_linears(*net, {.format = format, .lora = {.rank = 3}});
      return net;
    };
    const auto later = [&] { return seeded(9, [&] { return deferred(build); }); };
    for (const int world : fewer_on_devices<std::vector<int>>({1, 2, 3}, {2})) {
      on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        for (const bool sync : {true, false}) {
          Net reference = seeded(9, build);
          FsdpOptions options = fsdp_options();
          options.sync_module_states = sync;
          const Net net = later();
          for (const at::Tensor& parameter : net->parameters()) EXPECT_TRUE(is_deferred(parameter));
          FullyShardedDataParallel fsdp(net, comm, options);
          torch::optim::AdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-2));
          const std::string where = c10::str("format ", static_cast<int>(format), ", world ", world);
          train_and_compare(fsdp, optimizer, reference, world, comm->rank(), where);
          expect_same_parameters(fsdp, *reference, where);
        }
      });
    }
    Net filled = later(), reference = seeded(9, build);
    materialize(*filled);
    EXPECT_TRUE(torch::equal(loss_of(filled, 0, 0), loss_of(reference, 0, 0)));
  }
  Net written_down = deferred([] { return Net(); });
  expect_contains(error_of<std::invalid_argument>([&] { quantize_linears(*written_down); }),
                  "'in.weight' is deferred: quantize inside deferred()");
}

// Scales are part of the encoded bytes, which mixed precision does not cast.
TEST(QuantizedSharding, HasTheSameValuesUnderMixedPrecisionAndOffload) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    Net reference = net_of(WeightFormat::kNf4Double);
    FsdpOptions options = fsdp_options();
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.offload = {.params = true, .grads = true};
    FullyShardedDataParallel fsdp(net_of(WeightFormat::kNf4Double), comm, options);
    loss_of(fsdp, 0, comm->rank()).backward();
    const auto state = dequantized_state(*fsdp.module(), fsdp.full_state_dict());
    const auto expected = dequantized_state(*reference, reference->named_parameters());
    for (const auto& entry : expected) EXPECT_TRUE(torch::equal(state[entry.key()], entry.value())) << entry.key();
  });
}

TEST(QuantizedSharding, ChecksPointsGoOnAtAnyWorldSize) {
  const TemporaryFolder folder;
  const auto options = torch::optim::AdamWOptions(1e-2);
  auto step_of = [](auto& model, torch::optim::Optimizer& optimizer) {
    optimizer.zero_grad();
    loss_of(model, 0, 0).backward();  // the same on all ranks
    optimizer.step();
  };
  on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(net_of(WeightFormat::kNf4Double), comm, fsdp_options());
    torch::optim::AdamW optimizer(fsdp.parameters(), options);
    step_of(fsdp, optimizer);
    save_checkpoint(folder / "a", fsdp, optimizer);
  });
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Net net = net_of(WeightFormat::kNf4Double);
    {
      at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.zero_();
    }
    OSS<torch::optim::AdamW> optimizer(net->parameters(), options, comm);
    ShardedDataParallel sdp(net, optimizer, comm);
    load_checkpoint(folder / "a", sdp, optimizer);
    step_of(sdp, optimizer);
    save_checkpoint(folder / "b", sdp, optimizer);
  });
  on_ranks(4, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(net_of(WeightFormat::kNf4Double), comm, fsdp_options(2));
    torch::optim::AdamW optimizer(fsdp.parameters(), options);
    load_checkpoint(folder / "b", fsdp, optimizer);
    step_of(fsdp, optimizer);
    Net reference = net_of(WeightFormat::kNf4Double);
    torch::optim::AdamW whole(reference->parameters(), options);
    for (int i = 0; i < 3; ++i) step_of(reference, whole);
    const auto state = fsdp.full_state_dict();
    for (const auto& entry : reference->named_parameters())
      EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-5, 1e-6)) << entry.key();
  });
}

// Over dtypes, offload, copies of the model and deferred construction: 4 ranks begin and 3 resume. The reference is one
// process with fp32 master weights and, in mixed precision, a bf16 model.
enum class Tier { kDevice, kHost, kDisk };
struct Cell {
  bool mixed;
  Tier tier;
  int copies;
  bool is_deferred;
};

Net net_of_cells() {
  Net net;
  quantize_linears(*net, {.lora = {.rank = 3}});
  return net;
}
template <class Model>
at::Tensor loss_in_fp32(Model& model, int step, int part, at::ScalarType dtype = at::kFloat) {
  const at::Tensor x = seeded(100 * step + part, [] { return torch::randn({4, 8}); });
  return (call(model, x.to(dtype)).to(at::kFloat) - x).square().mean();
}

constexpr int kParts = 12, kSteps = 4;
Net cell_alone(bool mixed, const torch::optim::SGDOptions& options) {
  Net masters = seeded(9, net_of_cells), computing = seeded(9, net_of_cells);
  std::vector<at::Tensor> own, copies;
  for (size_t i = 0; i < masters->parameters().size(); ++i) {
    if (!at::isFloatingType(masters->parameters()[i].scalar_type())) continue;
    own.push_back(masters->parameters()[i]);
    copies.push_back(computing->parameters()[i]);
    if (mixed) copies.back().set_data(copies.back().detach().to(at::kBFloat16));
  }
  torch::optim::SGD optimizer(own, options);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < own.size(); ++i) {
      const at::NoGradGuard no_grad;
      copies[i].copy_(own[i]);
      own[i].mutable_grad() = own[i].requires_grad() ? torch::zeros_like(own[i]).detach() : at::Tensor();
    }
    for (int part = 0; part < kParts; ++part) {
      computing->zero_grad();
      loss_in_fp32(computing, step, part, mixed ? at::kBFloat16 : at::kFloat).backward();
      for (size_t i = 0; i < own.size(); ++i)
        if (own[i].requires_grad()) own[i].grad().add_(copies[i].grad().to(at::kFloat), 1.0 / kParts);
    }
    optimizer.step();
  }
  return masters;
}

TEST(QuantizedSharding, TrainsInEveryCombination) {
  const auto sgd = torch::optim::SGDOptions(0.2).momentum(0.9);
  std::vector<Cell> cells;
  for (const bool mixed : {false, true})
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kDisk})
      for (const int copies : {0, 2})
        for (const bool is_deferred : {false, true})
          if (has_full_matrix() ||
              ((copies == 2) == (mixed == (tier == Tier::kDisk)) && is_deferred == (mixed != (tier == Tier::kHost))))
            cells.push_back({mixed, tier, copies, is_deferred});
  for (const bool mixed : {false, true}) {
    const Net expected = cell_alone(mixed, sgd);
    for (const Cell& cell : cells) {
      if (cell.mixed != mixed) continue;
      const TemporaryFolder disk, folder;
      auto train = [&](int world, int copies, int first, int last) {
        on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
          FsdpOptions options = fsdp_options(copies);
          if (mixed) options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
          if (cell.tier != Tier::kDevice) options.offload = {.params = true, .grads = true};
          if (cell.tier == Tier::kDisk) options.offload.directory = disk.path().string();
          Net net = seeded(9, [&] { return cell.is_deferred ? deferred(net_of_cells) : net_of_cells(); });
          FullyShardedDataParallel fsdp(net, comm, options);
          torch::optim::SGD optimizer(fsdp.parameters(), sgd);
          if (first > 0) load_checkpoint(folder / "half", fsdp, optimizer);
          fsdp.set_gradient_divide_factor(kParts);
          for (int step = first; step < last; ++step) {
            fsdp.zero_grad();
            for (int i = 0; i < kParts / world; ++i) {
              std::optional<ScopeExit> adds_up;
              if (i + 1 < kParts / world) adds_up.emplace(fsdp.no_sync());
              loss_in_fp32(fsdp, step, comm->rank() * kParts / world + i).backward();
            }
            optimizer.step();
          }
          if (last < kSteps) return save_checkpoint(folder / "half", fsdp, optimizer);
          const auto state = fsdp.full_state_dict();
          // A master weight that rounds to the other bf16 neighbour changes the loss.
          for (const auto& entry : expected->named_parameters()) {
            const at::Tensor own = state[entry.key()].cpu();
            EXPECT_TRUE(torch::allclose(own, entry.value().detach(), 1e-5, mixed ? 2e-3 : 1e-5))
                << "mixed " << mixed << " tier " << static_cast<int>(cell.tier) << " copies " << cell.copies
                << " deferred " << cell.is_deferred << " " << entry.key() << " "
                << (own.to(at::kFloat) - entry.value().detach().to(at::kFloat)).abs().max().item<float>();
          }
        });
      };
      train(4, cell.copies, 0, kSteps / 2);
      train(3, 0, kSteps / 2, kSteps);
    }
  }
}

// A unit for each of the 32 layers of Llama 2 7B. docs/optimizers.md has these figures.
TEST(QuantizedSharding, SevenBillionParametersArePlanned) {
  const std::vector<std::pair<int64_t, int64_t>> linears{{4096, 4096},  {4096, 4096},  {4096, 4096}, {4096, 4096},
                                                         {4096, 11008}, {4096, 11008}, {11008, 4096}};
  auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  auto plan = [&](WeightFormat format, int world) {
    std::vector<int64_t> bytes, adapters;
    for (const auto& [in, out] : linears) {
      bytes.push_back(encoded_bytes(format, in * out));
      adapters.push_back(16 * in), adapters.push_back(16 * out);
    }
    const auto base = FlatLayout::evenly(bytes, world, FlatLayout::alignment_numel(1));
    const auto trained = FlatLayout::evenly(adapters, world, FlatLayout::alignment_numel(4));
    return std::array{mib(32 * base.shard_numel()), mib(base.full_numel()), mib(32 * 4 * trained.shard_numel())};
  };
  const auto alone = plan(WeightFormat::kNf4Double, 1), eight = plan(WeightFormat::kNf4Double, 8);
  EXPECT_NEAR(alone[0], 3186, 1);     // the base model
  EXPECT_NEAR(eight[0], 398.3, 0.3);  // a rank's shard of the base model
  EXPECT_NEAR(eight[1], 99.6, 0.1);   // an unsharded unit
  EXPECT_NEAR(eight[2], 19.1, 0.1);   // a rank's shard of the adapters
  EXPECT_NEAR(plan(WeightFormat::kInt8, 8)[0], 820.3, 0.5);
}

// memory() reports the bytes that the layouts predict; the base model has no gradients.
TEST(QuantizedSharding, TakesTheBytesThatArePlanned) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto net =
        seeded(1, [] { return torch::nn::Sequential(torch::nn::Linear(512, 512), torch::nn::Linear(512, 512)); });
    quantize_linears(*net, {.lora = {.rank = 4}});
    FullyShardedDataParallel fsdp(net, comm, fsdp_options());
    auto shard_bytes = [](std::vector<int64_t> numels, int64_t element_bytes) {
      const int64_t alignment = FlatLayout::alignment_numel(element_bytes);
      return FlatLayout::evenly(std::move(numels), 2, alignment).shard_numel() * element_bytes;
    };
    const int64_t base = shard_bytes({encoded_bytes(WeightFormat::kNf4Double, 512 * 512)}, 1);
    const int64_t adapters = shard_bytes({4 * 512, 512 * 4}, 4), bias = shard_bytes({512}, 4);
    EXPECT_EQ(fsdp.memory().shard_bytes, 2 * (base + adapters + bias));
    EXPECT_LT(base, 512 * 512 * 0.52 / 2 + 1024);
    fsdp(torch::ones({1, 512})).sum().backward();
    EXPECT_EQ(fsdp.memory().grad_bytes, 2 * adapters);
    EXPECT_LT(fsdp.memory().peak_gathered_bytes, 3 * (512 * 512 * 0.52 + 20000 + 4096));
  });
}

}  // namespace
}  // namespace tessera::quantized_test
