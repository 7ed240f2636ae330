// Mixed precision against a loop that does the same by hand: fp32 master weights, a 16-bit model, gradients summed in
// the reduce dtype. Bit for bit.
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

// A type of a program, with tessera_visit_tensors().
namespace program {

struct Batch {
  at::Tensor image;
  std::vector<at::Tensor> tokens;
};
template <class Visit>
void tessera_visit_tensors(Batch& batch, Visit&& visit) {
  visit(batch.image, batch.tokens);
}

}  // namespace program

namespace tessera::mixed_precision_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int64_t kWidth = 24;

// Two linear layers around a norm with a buffer of its own.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
    scale = register_buffer("scale", torch::full({kWidth}, 1.5));
    position = register_buffer("position", torch::arange(kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    x = torch::gelu(in(x)) * scale;
    // In the reference the norm's input and weight have different dtypes.
    x = exact_norm ? norm(x.to(at::kFloat)).to(x.scalar_type()) : norm(x);
    return out(x);
  }
  torch::nn::Linear in{kWidth, kWidth}, out{kWidth, kWidth};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  at::Tensor scale, position;
  bool exact_norm = false;
};
TORCH_MODULE(Net);

Net build() {
  return seeded(3, [] { return Net(); });
}
at::Tensor input(int rank) {
  return seeded(70 + rank, [&] { return torch::randn({4, kWidth}); });
}

// The reference: the same loop, written by hand.
class ByHand {
 public:
  ByHand(int world, at::ScalarType compute, at::ScalarType reduce, bool exact_norm)
      : world_(world), reduce_(reduce), model_(build()), masters_(build()) {
    model_->to(compute);
    model_->position = build()->position;
    model_->exact_norm = exact_norm;
    if (exact_norm) model_->norm->to(at::kFloat);
    adam_ = std::make_unique<torch::optim::Adam>(masters_->parameters(), 1e-2);
  }
  void backward(const std::function<at::Tensor(Net&, int)>& loss) {
    torch::NoGradGuard no_grad;
    auto masters = masters_->parameters(), own = model_->parameters();
    for (size_t i = 0; i < own.size(); ++i) own[i].copy_(masters[i]);
    std::vector<at::Tensor> sums(own.size());
    for (int rank = 0; rank < world_; ++rank) {
      model_->zero_grad();
      {
        torch::AutoGradMode on(true);
        loss(model_, rank).backward();
      }
      for (size_t i = 0; i < own.size(); ++i) {
        const bool exact = own[i].scalar_type() == at::kFloat;
        const at::Tensor sent = own[i].grad().to(exact ? at::kFloat : reduce_).to(at::kFloat);
        sums[i] = rank == 0 ? sent : sums[i] + sent;
      }
    }
    for (size_t i = 0; i < own.size(); ++i) {
      const bool exact = own[i].scalar_type() == at::kFloat;
      const at::Tensor mean = (sums[i] / world_).to(exact ? at::kFloat : reduce_).to(at::kFloat);
      masters[i].mutable_grad() = masters[i].grad().defined() ? masters[i].grad() + mean : mean;
    }
  }
  void step() {
    adam_->step();
    adam_->zero_grad();
  }
  Net& masters() { return masters_; }
  Net& model() { return model_; }

 private:
  const int world_;
  const at::ScalarType reduce_;
  Net model_, masters_;
  std::unique_ptr<torch::optim::Adam> adam_;
};

FsdpOptions options_of(at::ScalarType compute, std::optional<at::ScalarType> reduce, bool exact_norm) {
  FsdpOptions options;
  options.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
  options.mixed_precision.param_dtype = compute;
  options.mixed_precision.reduce_dtype = reduce;
  options.mixed_precision.buffer_dtype = compute;
  options.mixed_precision.output_dtype = at::kFloat;
  if (exact_norm) options.mixed_precision.full_precision = wrap_modules<torch::nn::LayerNormImpl>();
  return options;
}

template <class Model>
at::Tensor loss_of(Model& net, int rank) {
  return call(net, input(rank)).to(at::kFloat).square().mean();
}

TEST(MixedPrecision, ABufferOfTwoNamesKeepsItsOwnDtypeUnderBoth) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
    const at::Tensor table = torch::ones({3});
    for (size_t i = 0; i < 2; ++i) net->ptr(i)->register_buffer("table", table);
    on_rank_device(net);
    FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
    options.mixed_precision.buffer_dtype = at::kBFloat16;
    FullyShardedDataParallel fsdp(net, comm, options);
    const auto state = fsdp.full_state_dict();
    for (const char* name : {"0.table", "1.table"}) EXPECT_EQ(state[name].scalar_type(), at::kFloat) << name;
  });
}

class MixedPrecisionParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, MixedPrecisionParity, testing::Values(1, 2, 3, 4, 5));

TEST_P(MixedPrecisionParity, EqualsTheLoopByHand) {
  const int world = GetParam();
  on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    for (const auto compute : {at::kBFloat16, at::kHalf}) {
      for (const std::optional<at::ScalarType> reduce : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
        for (const bool exact_norm : {false, true}) {
          ByHand reference(world, compute, reduce.value_or(compute), exact_norm);
          FullyShardedDataParallel fsdp(build(), comm, options_of(compute, reduce, exact_norm));
          torch::optim::Adam adam(fsdp.parameters(), 1e-2);
          for (int step = 0; step < 4; ++step) {
            // In every second step two backwards, each of which reduces.
            for (int micro = 0; micro <= step % 2; ++micro) {
              loss_of(fsdp, comm->rank() + 10 * micro).backward();
              reference.backward([&](Net& net, int rank) {
                return net(input(rank + 10 * micro).to(compute)).to(at::kFloat).square().mean();
              });
            }
            adam.step();
            adam.zero_grad();
            reference.step();
          }
          expect_same_parameters(fsdp, *reference.masters(), "world " + std::to_string(world));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  });
}

TEST(MixedPrecision, ShardsAndStateStayExactWhatIsUsedIsNot) {
  for (int world : {1, 2}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      auto net = build();
      FullyShardedDataParallel fsdp(net, comm, options_of(at::kBFloat16, {}, true));
      for (const auto& entry : fsdp.named_parameters()) EXPECT_EQ(entry.value().scalar_type(), at::kFloat);
      EXPECT_EQ(net->in->weight.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->norm->weight.scalar_type(), at::kFloat);
      EXPECT_EQ(net->scale.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->position.scalar_type(), at::kLong);
      auto state = fsdp.full_state_dict();
      auto expected = build();
      for (const auto& entry : expected->named_parameters())
        EXPECT_TRUE(torch::equal(state[entry.key()], entry.value()));
      for (const auto& entry : expected->named_buffers()) EXPECT_TRUE(torch::equal(state[entry.key()], entry.value()));
      const at::Tensor y = fsdp(input(0));
      EXPECT_EQ(y.scalar_type(), at::kFloat);
      y.sum().backward();
      for (const auto& shard : fsdp.parameters()) EXPECT_EQ(shard.grad().scalar_type(), at::kFloat);
    });
  }
}

TEST(MixedPrecision, FullParametersAreExactAndMayBeChanged) {
  for (int world : {1, 3}) {
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      auto net = build();
      auto expected = build();
      FullyShardedDataParallel fsdp(net, comm, options_of(at::kBFloat16, {}, false));
      const at::Tensor before = fsdp(input(0)).detach();
      {
        auto guard = fsdp.summon_full_params();
        for (const auto& entry : expected->named_parameters())
          EXPECT_TRUE(torch::equal(net->named_parameters()[entry.key()], entry.value())) << entry.key();
        torch::NoGradGuard no_grad;
        net->out->bias.add_(1e-4);
        expected->out->bias.add_(1e-4);
      }
      EXPECT_EQ(net->out->bias.scalar_type(), at::kBFloat16);
      expect_same_parameters(fsdp, *expected, "after writing");
      // The hooks are registered again.
      fsdp(input(0)).sum().backward();
      for (const auto& shard : fsdp.parameters()) EXPECT_TRUE(shard.grad().defined());
      EXPECT_EQ(fsdp.memory().gathered_bytes, 0);
    });
  }
}

// Views of the summoned and of the gathered memory, used inside and outside the scope.
TEST(MixedPrecision, AViewOfWhatIsElsewhereNowIsRefusedByUnitAndRank) {
  for (const int world : {1, 2})
    on_ranks(world, [](std::shared_ptr<Communicator> comm) {
      auto net = build();
      FullyShardedDataParallel fsdp(net, comm, options_of(at::kBFloat16, {}, false));
      const std::string where = "a view of a parameter of unit 'in' is used on rank " + std::to_string(comm->rank());
      const at::Tensor before = net->in->weight.detach().view({-1});
      before.sum();
      const at::Tensor loss = fsdp(input(0)).sum();
      at::Tensor inside;
      {
        auto guard = fsdp.summon_full_params();
        inside = net->in->weight.detach().view({-1});
        for (int again = 0; again < 2; ++again) {
          inside.sum();  // the unit is current: its uses do not reach the pager
          expect_contains(error_of<std::logic_error>([&] { before.sum(); }),
                          where + " inside summon_full_params() that was made before it");
        }
        expect_contains(error_of<std::logic_error>([&] { loss.backward(); }),
                        "is used on rank " + std::to_string(comm->rank()) + " inside summon_full_params()");
      }
      before.sum();
      expect_contains(error_of<std::logic_error>([&] { inside.sum(); }),
                      where + " that was made inside summon_full_params(), and kept");
      fsdp.zero_grad();
      fsdp(input(0)).sum().backward();
      for (const auto& shard : fsdp.parameters()) EXPECT_TRUE(shard.grad().defined());
    });
}

TEST(MixedPrecision, ForwardInsideFullParametersIsExact) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto expected = build();
    FullyShardedDataParallel fsdp(build(), comm, options_of(at::kBFloat16, {}, true));
    const torch::NoGradGuard no_grad;
    const at::Tensor cast = fsdp(input(0));
    {
      auto guard = fsdp.summon_full_params();
      EXPECT_TRUE(at::equal(fsdp(input(0)), expected(input(0))));
    }
    EXPECT_TRUE(at::equal(fsdp(input(0)), cast));
    auto guard = fsdp.summon_full_params({.units = {"in", "out"}});  // the root unit, with the norm, is cast
    EXPECT_TRUE(fsdp.module()->in->weight.scalar_type() == at::kFloat);
  });
}

TEST(MixedPrecision, BytesOfAnotherDtypeInABufferAreRefusedByName) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    std::stringstream file, own;
    torch::save(torch::nn::BatchNorm1d(kWidth), file);
    const torch::nn::BatchNorm1d net = on_rank_device(torch::nn::BatchNorm1d(kWidth));
    FullyShardedDataParallel fsdp(net, comm, options_of(at::kBFloat16, {}, false));
    const std::string text = "' on rank " + std::to_string(comm->rank()) + " was given the bytes of Float values";
    {
      auto guard = fsdp.summon_full_params();
      torch::save(fsdp.module(), own);
      auto module = fsdp.module();
      torch::load(module, file);
      expect_contains(error_of<std::logic_error>([&] { fsdp(input(0)); }), text);
    }
    expect_contains(error_of<std::logic_error>([&] { fsdp(input(0)); }), text);
    expect_contains(error_of<std::logic_error>([&] { fsdp.full_state_dict(); }), text);
    auto module = fsdp.module();
    torch::load(module, own);
    EXPECT_TRUE(at::equal(fsdp.full_state_dict()["running_var"], at::ones({kWidth}, net->running_var.device())));
    fsdp(input(0)).sum().backward();
  });
}

TEST(MixedPrecision, ValuesThatTorchLoadsAreTakenAsTheyAre) {
  const torch::nn::Linear other(kWidth, kWidth);  // drawn before the ranks draw their own
  std::stringstream saved;
  torch::save(other, saved);
  for (const int world : {1, 2})
    run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      std::stringstream file(saved.str());
      FsdpOptions options;
      options.mixed_precision.param_dtype = at::kBFloat16;
      torch::nn::Linear model = on_rank_device(torch::nn::Linear(kWidth, kWidth));
      FullyShardedDataParallel fsdp(model, comm, options);
      torch::load(model, file);
      fsdp(input(comm->rank())).sum().backward();
      const auto state = fsdp.full_state_dict();
      for (const auto& parameter : other->named_parameters())
        EXPECT_TRUE(at::equal(state[parameter.key()].cpu(), parameter.value())) << parameter.key();
    });
}

TEST(MixedPrecision, HalvesTheBytesGatheredAndInUse) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto sent_by = [&](std::optional<at::ScalarType> compute, std::optional<at::ScalarType> reduce) {
      FsdpOptions options;
      options.mixed_precision.param_dtype = compute;
      options.mixed_precision.reduce_dtype = reduce;
      auto model = torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false));
      FullyShardedDataParallel fsdp(model, comm, options);
      fsdp(torch::ones({2, 64})).sum().backward();
      const auto before = comm->traffic().sent_bytes;
      fsdp(torch::ones({2, 64}));
      const auto gathered = comm->traffic().sent_bytes - before;
      EXPECT_EQ(fsdp.memory().gathered_bytes, 2 * gathered);
      EXPECT_EQ(fsdp.memory().shard_bytes, 64 * 64 * 4 / 2);
      return std::pair{gathered, fsdp.memory().peak_bucket_bytes};
    };
    EXPECT_EQ(sent_by({}, {}), (std::pair<int64_t, int64_t>{64 * 64 * 2, 64 * 64 * 4}));
    EXPECT_EQ(sent_by(at::kBFloat16, {}), (std::pair<int64_t, int64_t>{64 * 64, 64 * 64 * 2}));
    EXPECT_EQ(sent_by(at::kBFloat16, at::kFloat), (std::pair<int64_t, int64_t>{64 * 64, 64 * 64 * 4}));
    EXPECT_EQ(sent_by({}, at::kBFloat16), (std::pair<int64_t, int64_t>{64 * 64 * 2, 64 * 64 * 2}));
  });
}

struct ManyImpl : torch::nn::Module {
  ManyImpl() { register_module("linear", linear); }
  std::tuple<at::Tensor, int> forward(const std::vector<at::Tensor>& xs, std::optional<at::Tensor> y, at::Tensor& ids) {
    EXPECT_EQ(ids.scalar_type(), at::kLong);
    EXPECT_EQ(xs[0].scalar_type(), expected);
    EXPECT_EQ(y->scalar_type(), expected);
    return {linear(xs[0].to(at::kBFloat16) + y->to(at::kBFloat16)), 3};
  }
  at::ScalarType expected = at::kBFloat16;
  torch::nn::Linear linear{8, 8};
};
TORCH_MODULE(Many);

TEST(MixedPrecision, InputsOfManyTypesAreCastOnlyIfAsked) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (const bool cast : {true, false}) {
      Many model;
      model->expected = cast ? at::kBFloat16 : at::kFloat;
      FullyShardedDataParallel fsdp(
          model, comm,
          {.mixed_precision = {
               .param_dtype = at::kBFloat16, .cast_forward_inputs = cast, .output_dtype = at::kDouble}});
      at::Tensor ids = torch::arange(3);
      const std::vector<at::Tensor> xs{torch::ones({1, 8})};
      auto [y, number] = fsdp(xs, std::optional<at::Tensor>(torch::ones({1, 8})), ids);
      EXPECT_EQ(number, 3);
      EXPECT_EQ(y.scalar_type(), at::kDouble);
      EXPECT_EQ(xs[0].scalar_type(), at::kFloat);
    }
  });
}

struct TaughtImpl : torch::nn::Module {
  TaughtImpl() { register_module("linear", linear); }
  program::Batch forward(const program::Batch& batch) {
    EXPECT_EQ(batch.image.scalar_type(), at::kBFloat16);
    EXPECT_EQ(batch.tokens[0].scalar_type(), at::kLong);
    return {linear(batch.image), {batch.tokens[0] + 1}};
  }
  torch::nn::Linear linear{8, 8};
};
TORCH_MODULE(Taught);

TEST(MixedPrecision, CastsWhatTheProgramTeaches) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(Taught(), comm,
                                  {.mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kDouble}});
    const program::Batch batch{torch::ones({1, 8}), {torch::arange(3)}};
    const program::Batch out = fsdp(batch);
    EXPECT_EQ(out.image.scalar_type(), at::kDouble);
    EXPECT_EQ(out.tokens[0].scalar_type(), at::kLong);
    EXPECT_EQ(batch.image.scalar_type(), at::kFloat);
    out.image.sum().backward();
    EXPECT_TRUE(fsdp.parameters()[0].grad().defined());
  });
}

struct CacheImpl : torch::nn::Module {
  CacheImpl() { register_module("linear", linear); }
  at::Tensor forward(const at::Tensor& x, at::Tensor cache) {
    const at::Tensor y = linear(x);
    cache[0].add_(y[0]);
    return y;
  }
  torch::nn::Linear linear{8, 8};
};
TORCH_MODULE(Cache);

// A decoder's cache, which forward changes in place.
TEST(MixedPrecision, InPlaceChangesOfInputsReachTheCaller) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(Cache(), comm, {.mixed_precision = {.param_dtype = at::kBFloat16}});
    for (const bool is_inference : {false, true}) {
      const c10::InferenceMode mode(is_inference);
      const at::NoGradGuard no_grad;
      at::Tensor cache = on_rank_device(torch::zeros({2, 8}));
      const at::Tensor y = fsdp(on_rank_device(torch::ones({1, 8})), cache);
      EXPECT_EQ(cache.scalar_type(), at::kFloat);
      EXPECT_TRUE(torch::equal(cache[0], y[0].to(at::kFloat))) << is_inference;
      EXPECT_TRUE(cache[0].ne(0).any().item<bool>());
    }
  });
}

struct BatchNormNetImpl : torch::nn::Module {
  BatchNormNetImpl() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) { return out(norm(in(x))); }
  torch::nn::Linear in{8, 8}, out{8, 8};
  torch::nn::BatchNorm1d norm{torch::nn::BatchNormOptions(8).momentum(0.3)};
};
TORCH_MODULE(BatchNormNet);

// A plain loop: training, and a validation after each step. The reference casts fp32 weights in each linear layer and
// computes the norm in fp32.
TEST(MixedPrecision, BatchNormsComputeInFullPrecision) {
  const auto build_net = [] { return seeded(5, [] { return BatchNormNet(); }); };
  const auto rows = [](int step) { return seeded(90 + step, [] { return torch::randn({6, 8}); }); };
  BatchNormNet by_hand = build_net();
  const auto linear = [](torch::nn::Linear& layer, const at::Tensor& x) {
    return torch::linear(x, layer->weight.to(at::kBFloat16), layer->bias.to(at::kBFloat16));
  };
  const auto forward_by_hand = [&](const at::Tensor& x) {
    const at::Tensor inner = linear(by_hand->in, x.to(at::kBFloat16)).to(at::kFloat);
    return linear(by_hand->out, by_hand->norm(inner).to(at::kBFloat16));
  };
  const auto train = [&](auto forward, torch::nn::Module& module, std::vector<at::Tensor> parameters) {
    torch::optim::SGD sgd(std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
    std::vector<at::Tensor> outputs;
    for (int step = 0; step < 3; ++step) {
      module.train();
      sgd.zero_grad();
      outputs.push_back(forward(rows(step)));
      outputs.back().to(at::kFloat).square().mean().backward();
      sgd.step();
      module.eval();
      const at::NoGradGuard no_grad;
      outputs.push_back(forward(rows(-1)));
    }
    return outputs;
  };
  const auto expected = train(forward_by_hand, *by_hand, by_hand->parameters());
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    BatchNormNet net = build_net();
    FullyShardedDataParallel fsdp(net, comm,
                                  {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(),
                                   .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const auto outputs = train([&](const at::Tensor& x) { return fsdp(x); }, *net, fsdp.parameters());
    for (size_t i = 0; i < outputs.size(); ++i) EXPECT_TRUE(same_values(outputs[i], expected[i])) << "output " << i;
    EXPECT_TRUE(same_values(net->norm->running_var, by_hand->norm->running_var));
    EXPECT_TRUE(same_values(fsdp.full_state_dict()["norm.weight"], by_hand->norm->weight.detach()));
  });
}

TEST(MixedPrecision, BatchNormsKeepTheirStatisticsIfOnlyBuffersAreCast) {
  const auto build_net = [] { return seeded(5, [] { return BatchNormNet(); }); };
  const at::Tensor x = seeded(90, [] { return torch::randn({6, 8}); });
  BatchNormNet alone = build_net();
  alone->forward(x);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    BatchNormNet net = build_net();
    net->register_buffer("scale", torch::ones({8}));
    FullyShardedDataParallel fsdp(net, comm, {.mixed_precision = {.buffer_dtype = at::kBFloat16}});
    fsdp(on_rank_device(x));
    EXPECT_EQ(net->named_buffers()["scale"].scalar_type(), at::kBFloat16);
    for (const auto& buffer : alone->named_buffers()) {
      const at::Tensor own = net->named_buffers()[buffer.key()];
      EXPECT_EQ(own.scalar_type(), buffer.value().scalar_type()) << buffer.key();
      EXPECT_TRUE(torch::allclose(own, buffer.value())) << buffer.key() << own << buffer.value();
    }
  });
}

// A user's module with children that has the names of a batch norm's buffers is no batch norm.
struct NormalisedImpl : torch::nn::Module {
  NormalisedImpl() {
    register_buffer("running_mean", torch::zeros({8}));
    register_buffer("running_var", torch::ones({8}));
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{8, 8};
};
TORCH_MODULE(Normalised);

TEST(MixedPrecision, LayersBelowRunningStatisticsAreCast) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    Normalised inner;
    FullyShardedDataParallel fsdp(torch::nn::Sequential(inner), comm,
                                  {.mixed_precision = {.param_dtype = at::kBFloat16}});
    EXPECT_EQ(fsdp(torch::ones({2, 8})).scalar_type(), at::kBFloat16);
    EXPECT_EQ(inner->linear->weight.scalar_type(), at::kBFloat16);
  });
}

TEST(MixedPrecision, TakesWhateverModulesHold) {
  for (unsigned tree = 0; tree < 40; ++tree) {
    SCOPED_TRACE("RandomNet(" + std::to_string(tree) + ")");
    const auto net = seeded(7, [&] { return RandomNet(tree); });
    run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
      FullyShardedDataParallel fsdp(net, comm,
                                    {.auto_wrap = wrap_by_size(30), .mixed_precision = {.param_dtype = at::kBFloat16}});
      const auto out = fsdp(seeded(8, [] { return torch::randn({4, 8}); }));
      if (out.requires_grad()) out.sum().backward();
      EXPECT_TRUE(torch::isfinite(out).all().item<bool>());
    });
  }
}

struct NoTensorsImpl : torch::nn::Module {
  NoTensorsImpl() { register_module("linear", linear); }
  int forward(at::Tensor) { return 1; }
  torch::nn::Linear linear{2, 2};
};
TORCH_MODULE(NoTensors);

TEST(MixedPrecision, MistakesAreNamed) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto wrap = [&](FsdpOptions options) { FullyShardedDataParallel fsdp(torch::nn::Linear(2, 2), comm, options); };
    expect_contains(error_of<std::invalid_argument>([&] { wrap({.mixed_precision = {.param_dtype = at::kLong}}); }),
                    "param_dtype is Long");
    // Only stored and converted by libtorch, although at::isFloatingType() counts them.
    for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz,
                                       at::kFloat8_e8m0fnu, at::kFloat4_e2m1fn_x2}) {
      const std::string problem = std::string("dtype is ") + c10::toString(dtype) + ", expected Half, BFloat16, ";
      for (const auto& [field, precision] :
           std::map<std::string, MixedPrecision>{{"param_", {.param_dtype = dtype}},
                                                 {"reduce_", {.param_dtype = at::kHalf, .reduce_dtype = dtype}},
                                                 {"buffer_", {.buffer_dtype = dtype}},
                                                 {"output_", {.output_dtype = dtype}}})
        expect_contains(error_of<std::invalid_argument>([&] { wrap({.mixed_precision = precision}); }),
                        "FsdpOptions::mixed_precision." + field + problem);
    }
    FullyShardedDataParallel fsdp(NoTensors(), comm, {.mixed_precision = {.output_dtype = at::kFloat}});
    expect_contains(error_of<std::invalid_argument>([&] { fsdp(torch::ones({1})); }), "output_dtype");
  });
}

}  // namespace
}  // namespace tessera::mixed_precision_test
