// Models that are built without memory: values and bytes.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "core/layout/deferred.h"
#include "tests/support/random_net.h"
#include "tests/support/reference.h"

namespace tessera::deferred_test {
using namespace internal;
namespace {

using namespace testing_support;

torch::nn::Sequential everything() {
  return torch::nn::Sequential(torch::nn::Linear(40, 30), torch::nn::BatchNorm1d(30), torch::nn::Linear(30, 20),
                               torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(20, 4)),
                               torch::nn::Embedding(torch::nn::EmbeddingOptions(50, 20).padding_idx(0)),
                               torch::nn::LSTM(20, 20), torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)),
                               torch::nn::PReLU());
}

// Operators that draw without a generator argument, and values that depend on earlier values.
struct PeculiarImpl : torch::nn::Module {
  PeculiarImpl() {
    a = register_parameter("a", torch::randn({4, 4}) * 0.02 + torch::rand({4}));
    b = register_parameter("b", torch::linspace(0, 1, 5) * 2);
    register_buffer("e", torch::ones({2}, a.options()));
    register_buffer("f", torch::tensor({1.0, 2.0}));
    c = register_parameter("c", torch::cat({torch::zeros({2}), torch::randint(10, {3}).to(at::kFloat)}));
    d = register_buffer("d", torch::tril(torch::ones({3, 3}, at::kLong)));
    torch::NoGradGuard no_grad;
    a.mul_(outside);
    torch::nn::init::orthogonal_(a);
    b[0] = 7;
  }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, a); }
  at::Tensor outside = torch::full({4, 4}, 3.0);
  at::Tensor a, b, c, d;
};
TORCH_MODULE(Peculiar);

// Deferred and ordinary tensors in lists of tensors and of indices, some of which are undefined.
struct IndexedImpl : torch::nn::Module {
  explicit IndexedImpl(const at::Tensor& table) {
    const at::Tensor order = torch::arange(3).mul(2);
    diagonal = register_parameter("diagonal", torch::randn({6, 6}).index({order, order}));
    register_buffer("columns", torch::randn({2, 6}).index({torch::indexing::Slice(), order}));
    register_buffer("looked_up", table.index({order}));
    register_buffer("by_mask", torch::randn({6}).index({table > 2}));
    register_buffer("joined", torch::cat({table, torch::rand({2}), table}));
    torch::NoGradGuard no_grad;
    diagonal.index_put_({torch::arange(2)}, torch::full({2}, 5.0));
  }
  at::Tensor diagonal;
};
TORCH_MODULE(Indexed);

// Rotary embeddings: complex values as real ones and back, with conjugate and negative bits, and values as integers.
struct RotaryImpl : torch::nn::Module {
  RotaryImpl() {
    const at::Tensor turns = torch::polar(torch::ones({5, 3}), torch::rand({5, 3}));
    register_buffer("turns", turns);
    register_buffer("pairs", torch::view_as_real(turns));
    register_buffer("cosines", torch::real(turns));
    register_buffer("sines", torch::imag(turns.conj()) * 2);
    register_buffer("back", torch::view_as_complex(torch::view_as_real(turns) * 3));
    register_buffer("products", turns * turns.conj());
    register_buffer("bits", torch::rand({4}).view(at::kInt) + 1);
    register_parameter("scale", torch::rand({3}));
  }
};
TORCH_MODULE(Rotary);

template <class Build>
void expect_same_values(Build build) {
  auto expected = seeded(7, build);
  auto model = seeded(7, [&] { return deferred(build); });
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(is_deferred(parameter));
  const at::Tensor between = seeded(8, [] { return torch::rand({2}); });
  at::Tensor after;
  {
    std::lock_guard lock(generator_mutex);
    torch::manual_seed(8);
    materialize(*model);
    after = torch::rand({2});
  }
  EXPECT_TRUE(torch::equal(between, after));  // the generator is as before
  for (const auto& entry : expected->named_parameters()) {
    const at::Tensor got = model->named_parameters()[entry.key()];
    EXPECT_TRUE(torch::equal(got, entry.value())) << entry.key();
    EXPECT_EQ(got.requires_grad(), entry.value().requires_grad());
    EXPECT_EQ(got.strides(), entry.value().strides()) << entry.key();
  }
  for (const auto& entry : expected->named_buffers())
    EXPECT_TRUE(torch::equal(model->named_buffers()[entry.key()], entry.value())) << entry.key();
}

// A thread that holds the generator's mutex draws, so the state must not change meanwhile.
TEST(Deferred, LocksTheDefaultGeneratorWhileItChangesTheState) {
  auto model = deferred([] { return Peculiar(); });
  at::Generator common = at::detail::getDefaultCPUGenerator();
  std::unique_lock draws(common.mutex());
  const at::Tensor before = common.get_state();
  std::thread other([&] { materialize(*model); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_TRUE(at::equal(common.get_state(), before));
  draws.unlock();
  other.join();
}

TEST(Deferred, ValuesAreThoseOfAnOrdinaryBuild) {
  expect_same_values(everything);
  expect_same_values([] { return Peculiar(); });
  expect_same_values([] { return Rotary(); });
  expect_same_values([table = torch::arange(6).to(at::kFloat)] { return Indexed(table); });
  for (unsigned kind = 0; kind < 10; ++kind) expect_same_values([&] { return RandomNet(kind); });
}

TEST(Deferred, FsdpFillsUnitByUnitWithTheSameValues) {
  for (int world : {1, 2, 3, 4, 5}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      for (unsigned kind = 0; kind < 4; ++kind) {
        for (const bool sync : {true, false}) {
          auto build = [&] { return RandomNet(200 + kind); };
          auto reference = seeded(3, build);
          auto model = seeded(sync && comm->rank() > 0 ? 4 : 3, [&] { return deferred(build); });
          FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_by_size(60), .sync_module_states = sync});
          expect_same_parameters(fsdp, *reference, "tree " + std::to_string(kind));
          auto state = fsdp.full_state_dict();
          for (const auto& entry : reference->named_buffers())
            EXPECT_TRUE(torch::equal(state[entry.key()], entry.value())) << entry.key();
          torch::optim::SGD sharded(fsdp.parameters(), 0.1), whole(unique_parameters(*reference), 0.1);
          auto loss = [](auto& net, int rank) {
            return call(net, seeded(rank, [] { return torch::randn({4, testing_support::kWidth}); })).square().mean();
          };
          at::Tensor own = loss(fsdp, comm->rank());
          if (own.requires_grad()) own.backward();
          reference_backward(reference, world, [&](int rank) { return loss(reference, rank); });
          sharded.step();
          whole.step();
          expect_same_parameters(fsdp, *reference, "trained");
          if (testing::Test::HasFailure()) return;
        }
      }
    });
  }
}

// Counts the bytes in use of libtorch's CPU allocator.
class Counting : public c10::Allocator {
 public:
  explicit Counting(c10::Allocator* below) : below_(below) {}
  c10::DataPtr allocate(size_t bytes) override {
    const int64_t now = live += static_cast<int64_t>(bytes);
    for (int64_t seen = peak; seen < now && !peak.compare_exchange_weak(seen, now);) continue;
    auto* block = new Block{below_->allocate(bytes), this, static_cast<int64_t>(bytes)};
    void* data = block->data.get();
    return {data, block, &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  std::atomic<int64_t> live = 0, peak = 0;

 private:
  struct Block {
    c10::DataPtr data;
    Counting* counter;
    int64_t bytes;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    block->counter->live -= block->bytes;
    delete block;
  }
  c10::Allocator* below_;
};

// Two critics of one class, say.
TEST(Deferred, TwoModulesInARowHaveValuesOfTheirOwn) {
  const auto draws = [] { return torch::nn::Linear(4, 4); };
  const auto draws_nothing = [] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})); };
  auto [first, second] = seeded(7, [&] { return std::pair(deferred(draws), deferred(draws)); });
  materialize(*first), materialize(*second);
  EXPECT_FALSE(torch::equal(first->weight, second->weight));
  const at::Tensor expected = seeded(7, [] { return torch::rand({3}); });
  EXPECT_TRUE(torch::equal(expected, seeded(7, [&] { return deferred(draws_nothing), torch::rand({3}); })));
}

TEST(Deferred, TakesTheShardsAndOneUnit) {
  c10::Allocator* const before_test = c10::GetCPUAllocator();
  static Counting counting(before_test);  // blocks may outlive the test
  c10::SetCPUAllocator(&counting, /*priority=*/1);
  // oneDNN's kernels need an allocator that supports raw_allocate().
  const ScopeExit restores([&] { c10::SetCPUAllocator(before_test, /*priority=*/1); });
  constexpr int64_t kUnitBytes = (256 * 256 + 256) * 4, kUnits = 16;
  auto build = [] {
    torch::nn::Sequential model;
    for (int i = 0; i < kUnits; ++i) model->push_back(torch::nn::Linear(256, 256));
    return model;
  };
  for (const bool is_deferred_build : {false, true}) {
    at::manual_seed(1);
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      if (comm->rank() == 0) counting.peak = counting.live.load();
      const int64_t before = counting.live;
      comm->barrier();
      auto model = is_deferred_build ? deferred(build) : build();
      EXPECT_LT(counting.live - before, is_deferred_build ? 100'000 : kUnits * kUnitBytes * 3);  // generator states
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      comm->barrier();
      // The shards of both ranks are one model. Each rank also has the values of a unit, their flat copy, and buffers
      // of the exchange.
      const int64_t peak = counting.peak - before;
      if (is_deferred_build) {
        EXPECT_LT(peak, kUnits * kUnitBytes + 2 * 3 * kUnitBytes);
      } else {
        EXPECT_GT(peak, 2 * kUnits * kUnitBytes);
      }
      comm->barrier();
    });
  }
}

// libtorch 2.11 has no meta kernels for these outside Python.
struct WithoutMetaKernelsImpl : torch::nn::Module {
  WithoutMetaKernelsImpl() {
    const at::Tensor a = torch::rand({3, 4}), b = torch::rand({3, 4}), none = torch::zeros({3, 4});
    register_buffer("polar", torch::polar(a, b));
    register_buffer("complex", torch::complex(a, b));
    register_buffer("chosen", torch::where(a > 0.5, a, b));
    register_buffer("numbers", torch::where(a > 0.5, 2.0, 0.5));
    register_buffer("drawn", torch::multinomial(a, 2));
    register_buffer("flipped", a.flip({0}));
    register_buffer("permutation", torch::randperm(5));
    register_parameter("weight", torch::where(b > 0.5, b, none).index_select(0, torch::randperm(3)));
  }
};
TORCH_MODULE(WithoutMetaKernels);

TEST(Deferred, OperatorsWithoutMetaKernelsGetTheirShapesFromExamples) {
  torch::manual_seed(11);
  WithoutMetaKernels later = deferred([] { return WithoutMetaKernels(); });
  const at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = generator.get_state();
  for (const at::Tensor& buffer : later->buffers()) EXPECT_TRUE(is_deferred(buffer));
  torch::manual_seed(11);
  generator.get<at::CPUGeneratorImpl>()->random();
  EXPECT_TRUE(at::equal(generator.get_state(), state));  // examples draw nothing
  torch::manual_seed(11);
  const WithoutMetaKernels expected;
  torch::manual_seed(12);  // the values are those of the call
  materialize(*later);
  for (const auto& list : {&torch::nn::Module::named_buffers, &torch::nn::Module::named_parameters})
    for (const auto& own : ((*expected).*list)(true))
      EXPECT_TRUE(at::equal(own.value(), ((*later).*list)(true)[own.key()])) << own.key();
  const std::string says = "cannot compute the shape of the result of aten::";
  expect_contains(error_of<std::logic_error>([] { deferred([] { return torch::nonzero(torch::rand({3})); }); }), says);
}

TEST(Deferred, KnowsTheDeviceOfItsValues) {
  const at::Device second(at::kCUDA, 1);
  const DeferredScope scope;
  const at::Tensor here = torch::ones({2}), there = torch::ones({2}, second);
  for (const at::Tensor& tensor : {there, there * 2, torch::zeros_like(there), here.to(second), there.view({1, 2})})
    EXPECT_EQ(device_of_values(tensor), second);
  for (const at::Tensor& tensor : {here, here * 2, there.cpu(), torch::zeros({2}, there.options())})
    EXPECT_EQ(device_of_values(tensor), at::kCPU);
}

TEST(Deferred, ParametersMadeInInferenceModeAreNamed) {
  torch::nn::Sequential frozen{nullptr};
  {
    const c10::InferenceMode mode;
    frozen = torch::nn::Sequential(torch::nn::Linear(2, 2));
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  run_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    const std::string says =
        "parameter '0.weight' on rank " + std::to_string(comm->rank()) + " was made in InferenceMode";
    expect_contains(error_of<std::invalid_argument>([&] { FullyShardedDataParallel fsdp(frozen, comm); }), says);
    expect_contains(error_of<std::invalid_argument>([&] { DistributedDataParallel ddp(frozen, comm); }), says);
  });
}

struct ReadLaterImpl : torch::nn::Module {
  explicit ReadLaterImpl(const ReadElements& read) {
    weight = register_parameter("weight", deferred_from({4, 4}, {4, 1}, at::kFloat, at::kCPU, read));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(ReadLater);

TEST(Deferred, AFailedReadLeavesTheModuleDeferred) {
  for (const int world : {1, 2})
    run_ranks(world, [](const std::shared_ptr<Communicator>& comm) {
      bool is_damaged = true;
      auto read = [&is_damaged](bool may_fail) {
        return [&is_damaged, may_fail](Range elements, void* target) {
          if (may_fail && is_damaged) throw std::runtime_error("the file is damaged");
          std::fill_n(static_cast<float*>(target), elements.numel(), 0.5F);
        };
      };
      torch::nn::Sequential model(ReadLater(read(false)), ReadLater(read(true)));
      const FsdpOptions options{.auto_wrap = wrap_modules<ReadLaterImpl>()};
      expect_contains(error_of<std::runtime_error>([&] { FullyShardedDataParallel fsdp(model, comm, options); }),
                      "the file is damaged");
      for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(is_deferred(parameter));
      is_damaged = false;
      FullyShardedDataParallel fsdp(model, comm, options);
      EXPECT_EQ(fsdp(torch::ones({1, 4})).sum().item<float>(), 16);
    });
}

TEST(Deferred, MistakesAreNamed) {
  expect_contains(error_of<std::logic_error>([] { deferred([] { return deferred(everything); }); }), "inside");
  EXPECT_NE(error_of<std::exception>([] {
              deferred([] { return torch::nn::Linear(static_cast<int64_t>(torch::ones({1}).item<float>()), 2); });
            }),
            "");
  EXPECT_NE(error_of<std::exception>([] {
              deferred([] {
                torch::nn::Linear made(2, 2);
                made->register_buffer("list", torch::tensor(std::vector<double>{1.0, 2.0}));
                return made;
              });
            }),
            "");
  auto read_later = [] { return deferred_from({2}, {1}, at::kFloat, at::kCPU, [](Range, void*) {}); };
  const std::string says = "is given a tensor whose values will be read later";
  expect_contains(error_of<std::logic_error>([&] { deferred([&] { return read_later().add(1); }); }), says);
  expect_contains(error_of<std::logic_error>([&] { deferred([&] { return torch::cat({read_later()}); }); }), says);
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential model(torch::nn::Linear(2, 2));
    model->register_parameter("extra", torch::empty({2}, at::kMeta));
    expect_contains(error_of<std::invalid_argument>([&] { FullyShardedDataParallel fsdp(model, comm); }), "is on meta");
  });
}

}  // namespace
}  // namespace tessera::deferred_test
