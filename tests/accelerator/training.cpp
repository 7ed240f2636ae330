#include "tests/accelerator/training.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "tests/support/accelerator/accelerator.h"

namespace tessera::accelerator_training {
using namespace internal;
namespace {

using testing_support::seeded;

constexpr int64_t kFeatures = 24;
constexpr int kBlocks = 4, kSteps = 3;
// The tower of each block, in the order of the host's calls. True: the tower on the side stream.
constexpr bool kTowers[] = {true, false, true, false, false, true};

void order(const c10::Stream& first, const c10::Stream& then) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}
c10::Stream current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }
c10::Stream new_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

struct NetImpl : torch::nn::Module {
  NetImpl(const Case& of, int rank) : of_(of), rank_(rank) {
    const int count = of.towers ? static_cast<int>(std::size(kTowers)) : kBlocks;
    for (int i = 0; i < count; ++i) blocks->push_back(torch::nn::Linear(kFeatures, kFeatures));
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("unused", unused);
  }
  at::Tensor forward(at::Tensor x) {
    if (of_.towers) return norm(towers(x));
    for (int i = 0; i < kBlocks; ++i) {
      if (i == 2 && rank_ == of_.unused_on) continue;
      auto block = blocks->ptr<torch::nn::LinearImpl>(i);
      auto run = [&](const at::Tensor& in) { return call_block(i, in); };
      if (of_.branches && i % 2 == 1) {
        x = beside(x, run);
        watch(block->weight);
      } else {
        x = run(x);
      }
    }
    if (side_) order(*side_, current_stream(x.device()));
    return norm(x);
  }
  at::Tensor call_block(int i, const at::Tensor& x) {
    auto block = blocks->ptr<torch::nn::LinearImpl>(i);
    auto once = [block](const at::Tensor& in) { return torch::tanh(block->forward(in)); };
    const bool ends_towers = of_.towers && i + 1 == static_cast<int>(std::size(kTowers));  // so not checkpointed
    return of_.checkpointed && !ends_towers ? checkpointed(once, x) : once(x);
  }
  // Only the sum of both towers' results uses a result of the side stream on the main stream.
  at::Tensor towers(const at::Tensor& x) {
    at::Tensor ours = x, beside = x;
    if (!x.is_cpu()) {
      if (!side_) side_ = new_stream(x.device());
      order(current_stream(x.device()), *side_);
      x.record_stream(*side_);
    }
    for (size_t i = 0; i < std::size(kTowers); ++i) {
      at::Tensor& tower = kTowers[i] ? beside : ours;
      const c10::OptionalStreamGuard on(kTowers[i] ? side_ : std::nullopt);
      tower = call_block(static_cast<int>(i), tower);
    }
    if (side_) {
      order(*side_, current_stream(x.device()));
      beside.record_stream(current_stream(x.device()));
    }
    return ours + beside;
  }
  // Allocates tensors on the side stream without any order after the loop's work, like a data loader.
  void make_next_batch() const {
    if (!side_) return;
    c10::StreamGuard on(*side_);
    std::vector<at::Tensor> parts;
    for (int i = 0; i < 6; ++i) parts.push_back(torch::ones({kFeatures, kFeatures}, side_->device()));
    for (int i = 0; i < 6; ++i) parts.push_back(torch::ones({kFeatures}, side_->device()));
  }
  // Computes a statistic of a weight on the side stream, for which no stream waits until the end of forward.
  void watch(const at::Tensor& weight) {
    if (!side_) return;
    c10::StreamGuard on(*side_);
    for (int i = 0; i < 4; ++i) weight.detach().square().sum();
  }
  // Runs the second half of a batch on the model's own stream, with the order that a careful user requests. The main
  // stream uses the weight just before and just after.
  template <class Run>
  at::Tensor beside(const at::Tensor& x, Run run) {
    if (x.is_cpu()) return torch::cat({run(x.narrow(0, 0, 2)), run(x.narrow(0, 2, 2))});
    const c10::Stream main = current_stream(x.device());
    if (!side_) side_ = new_stream(x.device());
    const at::Tensor first = run(x.narrow(0, 0, 2));
    order(main, *side_);
    at::Tensor second;
    {
      c10::StreamGuard on(*side_);
      second = run(x.narrow(0, 2, 2));
    }
    order(*side_, main);
    x.record_stream(*side_);
    second.record_stream(main);
    return torch::cat({first, second});
  }

  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kFeatures})};
  torch::nn::Linear unused{kFeatures, kFeatures};

 private:
  const Case of_;
  const int rank_;
  std::optional<c10::Stream> side_;
};
TORCH_MODULE(Net);

// The stream on which the loop runs a step, ordered after all earlier and before all later work of the loop.
class LoopStream {
 public:
  LoopStream(const Case& of, at::Device device) : device_(device) {
    if (device.is_cpu()) return;
    for (int i = 0; i < (of.two_streams ? 2 : of.side_stream ? 1 : 0); ++i) streams_.push_back(new_stream(device));
  }
  template <class Step>
  void run(int step, Step body) {
    if (streams_.empty()) return body();
    const c10::Stream outer = current_stream(device_), stream = streams_[step % streams_.size()];
    order(outer, stream);
    {
      c10::StreamGuard on(stream);
      body();
    }
    order(stream, outer);
  }

 private:
  const at::Device device_;
  std::vector<c10::Stream> streams_;
};

template <class Wrapper>
State run_steps(const Case& of, Wrapper& wrapper, torch::optim::Optimizer& optimizer, Communicator& comm) {
  const at::Device device = comm.device();
  std::optional<ActivationOffload> activations;
  if (of.activations) activations.emplace(device, ActivationOffloadOptions{.min_bytes = 0});
  LoopStream stream(of, device);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor batch = seeded(100 * step + comm.rank(), [] { return torch::randn({4, kFeatures}); });
    stream.run(step, [&] {
      const at::Tensor x = batch.to(device);
      auto backward = [&](double scale) {
        std::optional<ActivationOffload::Scope> use;
        if (activations) use.emplace(*activations);
        (wrapper(x) * scale).square().sum().backward();
      };
      auto evaluate = [&] {
        at::NoGradGuard no_grad;
        wrapper(x);
      };
      optimizer.zero_grad();
      if (of.accumulates) {
        auto own = wrapper.no_sync();
        backward(0.5);
      }
      backward(1);
      if (of.towers) wrapper.module()->make_next_batch();
      if (of.clips) wrapper.clip_grad_norm_on_device_(0.5);
      if (of.evaluates) evaluate();
      optimizer.step();
      if (of.evaluates) evaluate();
    });
  }
  State state;
  if constexpr (requires { wrapper.full_state_dict(); }) {
    for (auto& entry : wrapper.full_state_dict()) state[entry.key()] = entry.value().cpu();
  } else {
    for (auto& entry : wrapper.module()->named_parameters()) state[entry.key()] = entry.value().detach().cpu();
  }
  return state;
}

}  // namespace

State train(const Case& of, std::shared_ptr<Communicator> comm) {
  Net net = seeded(5, [&] { return Net(of, comm->rank()); });
  net->to(comm->device());
  // GPUs round products differently, so they have a large epsilon, with which a step does not amplify the difference.
  const auto adam = torch::optim::AdamWOptions(1e-2).eps(accelerator::on_gpus() ? 1 : 1e-8);
  if (of.wrapper == Case::kFsdp) {
    FsdpOptions options = of.fsdp;
    if (!of.one_unit) options.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
    FullyShardedDataParallel fsdp(net, comm, options);
    if (of.host_adam) {
      HostAdamW optimizer(fsdp.parameters(), adam);
      return run_steps(of, fsdp, optimizer, *comm);
    }
    torch::optim::AdamW optimizer(fsdp.parameters(), adam);
    return run_steps(of, fsdp, optimizer, *comm);
  }
  if (of.wrapper == Case::kDdp) {
    DistributedDataParallel ddp(net, comm, DdpOptions{.bucket_bytes = 4194, .find_unused_parameters = true});
    torch::optim::AdamW optimizer(net->parameters(), adam);
    return run_steps(of, ddp, optimizer, *comm);
  }
  OSS<torch::optim::AdamW> optimizer(net->parameters(), adam, comm,
                                     OssOptions{.offload = {of.fsdp.offload.params, of.fsdp.offload.grads}});
  ShardedDataParallel sdp(net, optimizer, comm,
                          SdpOptions{.reduce_bucket_bytes = of.towers ? 0 : 4000, .wire = of.wire});
  return run_steps(of, sdp, optimizer, *comm);
}

State train_on_gloo(const Case& of) {
  State state;
  testing_support::on_ranks(of.world, [&](std::shared_ptr<Communicator> comm) {
    State own = train(of, comm);
    if (comm->rank() == 0) state = std::move(own);
  });
  return state;
}

std::string difference(const State& expected, const State& got, double tolerance) {
  std::string text;
  for (const auto& [name, value] : expected) {
    const auto other = got.find(name);
    if (other == got.end()) {
      text += " " + name + " is missing;";
    } else if (tolerance > 0 ? !torch::allclose(other->second, value, tolerance, tolerance)
                             : !torch::equal(value, other->second)) {
      text += c10::str(" ", name, " by ", (value - other->second).abs().max().item<double>(), ";");
    }
  }
  return text.empty() && got.size() != expected.size() ? " more tensors" : text;
}

const std::vector<Case>& cases() {
  static const CpuOffload host{.params = true, .grads = true};
  static const MixedPrecision bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  static const std::vector<Case> all = {
      {.name = "fsdp"},
      {.name = "fsdp_three_ranks", .world = 3, .clips = true, .accumulates = true},
      {.name = "fsdp_kept_gathered", .fsdp = {.reshard_after_forward = false}},
      {.name = "fsdp_prefetches_three", .fsdp = {.prefetch = 3}, .evaluates = true},
      {.name = "fsdp_hybrid", .world = 4, .fsdp = {.hybrid = {.ranks_per_copy = 2}}, .clips = true},
      {.name = "fsdp_secondary_copies",
       .world = 4,
       .fsdp = {.prefetch = 2, .hybrid = {.ranks_per_secondary_copy = 2}},
       .clips = true,
       .accumulates = true},
      {.name = "fsdp_bf16", .fsdp = {.mixed_precision = bf16}},
      {.name = "fsdp_offload", .fsdp = {.offload = host}},
      {.name = "fsdp_offload_host_adam", .fsdp = {.offload = host}, .host_adam = true, .evaluates = true},
      {.name = "fsdp_offload_bf16", .fsdp = {.mixed_precision = bf16, .offload = host}, .host_adam = true},
      {.name = "fsdp_offload_side_stream", .fsdp = {.offload = host}, .host_adam = true, .side_stream = true},
      {.name = "fsdp_checkpointed", .checkpointed = true},
      {.name = "fsdp_activations", .checkpointed = true, .activations = true},
      {.name = "fsdp_activations_two_streams", .checkpointed = true, .activations = true, .two_streams = true},
      {.name = "fsdp_activations_branches", .checkpointed = true, .activations = true, .branches = true},
      {.name = "fsdp_side_stream", .side_stream = true},
      {.name = "fsdp_two_streams", .two_streams = true, .evaluates = true},
      {.name = "fsdp_branches", .branches = true},
      {.name = "fsdp_branches_prefetch", .world = 3, .fsdp = {.prefetch = 2}, .branches = true, .accumulates = true},
      {.name = "fsdp_activations_towers", .checkpointed = true, .activations = true, .towers = true},
      // The unit's gradients, from both streams, wait until backward ends, when unused parameters are known.
      {.name = "fsdp_one_unit_towers", .checkpointed = true, .side_stream = true, .towers = true, .one_unit = true},
      {.name = "sdp", .wrapper = Case::kSdp},
      {.name = "sdp_three_ranks", .wrapper = Case::kSdp, .world = 3, .clips = true, .accumulates = true},
      {.name = "sdp_unused_on_a_rank", .wrapper = Case::kSdp, .world = 3, .unused_on = 1},
      {.name = "sdp_int8", .wrapper = Case::kSdp, .world = 3, .wire = WireFormat::kInt8Blocks},
      {.name = "sdp_offload", .wrapper = Case::kSdp, .fsdp = {.offload = host}},
      {.name = "sdp_offload_two_streams", .wrapper = Case::kSdp, .fsdp = {.offload = host}, .two_streams = true},
      {.name = "sdp_branches", .wrapper = Case::kSdp, .branches = true},
      {.name = "sdp_towers", .wrapper = Case::kSdp, .side_stream = true, .towers = true},
      {.name = "ddp", .wrapper = Case::kDdp, .world = 3, .clips = true},
      {.name = "ddp_two_streams", .wrapper = Case::kDdp, .two_streams = true},
      {.name = "ddp_branches", .wrapper = Case::kDdp, .branches = true, .accumulates = true},
  };
  return all;
}

const Case& case_named(const std::string& name) {
  for (const Case& of : cases())
    if (of.name == name) return of;
  throw std::invalid_argument("there is no case " + name);
}

}  // namespace tessera::accelerator_training
