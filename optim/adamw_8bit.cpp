#include <tessera/optim/adamw_8bit.h>

#include <ATen/OpMathType.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

#include <tessera/host_results.h>
#include "core/paging/residency.h"
#include "core/trace/trace.h"
#include "optim/host/adam_update.h"
#include "optim/state/optimizer_state.h"

namespace tessera {
using namespace internal;
namespace {

constexpr int64_t kBlock = kStateBlockNumel;
constexpr int64_t kChunkBlocks = 4096;

// The values of the 8-bit codes. `middles` holds the 255 midpoints of neighboring values, for rounding to a code.
struct Map {
  at::Tensor values, middles;
  int64_t zero;  // index of the value 0
};

const Map& map_of(bool is_signed, at::Device device) {
  thread_local std::map<std::pair<bool, std::string>, Map> maps;
  Map& map = maps[{is_signed, device.str()}];
  if (!map.values.defined()) {
    const at::Tensor values = dynamic_map(is_signed);
    map.zero = (values == 0).nonzero()[0].item<int64_t>();
    map.middles = ((values.narrow(0, 0, 255).to(at::kDouble) + values.narrow(0, 1, 255).to(at::kDouble)) / 2)
                      .to(at::kFloat)
                      .to(device);
    map.values = values.to(device);
  }
  return map;
}

at::Tensor dequantized(const at::Tensor& codes, const at::Tensor& scales, const Map& map) {
  return map.values.index_select(0, codes.to(at::kInt).view({-1})).view(codes.sizes()) * scales.unsqueeze(1);
}

at::Tensor quantized(const at::Tensor& values, const at::Tensor& scales, const Map& map) {
  const at::Tensor divisors = scales.clamp_min(std::numeric_limits<float>::min()).unsqueeze(1);
  return at::bucketize(values / divisors, map.middles, /*out_int32=*/true).to(at::kByte);
}

// Re-encodes the state of a whole parameter for the memory order of `strides`, and computes the new blocks' scales.
void reorder_blocks(at::Tensor& codes, at::Tensor& scales, at::IntArrayRef strides, const Map& map) {
  const int64_t numel = codes.numel();
  auto in_blocks = [&](const at::Tensor& elements, double padding) {
    at::Tensor padded = at::full({scales.numel() * kBlock}, padding, elements.options());
    padded.narrow(0, 0, numel).copy_(in_memory_order(elements));
    return padded.view({-1, kBlock});
  };
  const at::Tensor old = dequantized(in_blocks(codes, static_cast<double>(map.zero)), scales, map).view({-1});
  const at::Tensor values = in_blocks(in_strides(old.as_strided(codes.sizes(), codes.strides()), strides), 0);
  codes = at::empty_strided(codes.sizes(), strides, codes.options());
  scales = values.abs().amax(1);
  in_memory_order(codes).copy_(quantized(values, scales, map).view({-1}).narrow(0, 0, numel));
}

}  // namespace

at::Tensor dynamic_map(bool is_signed) {
  constexpr int kExponents = 7;
  std::vector<float> values{0.0F, 1.0F};
  for (int exponent = 0; exponent < kExponents; ++exponent) {
    const int fractions = 1 << (is_signed ? exponent : exponent + 1);
    const double magnitude = std::pow(10.0, exponent + 1 - kExponents);
    for (int i = 0; i < fractions; ++i) {
      const double fraction = 0.1 + 0.9 * (i + 0.5) / fractions;  // middle of one of the equal parts of [0.1, 1]
      values.push_back(static_cast<float>(magnitude * fraction));
      if (is_signed) values.push_back(static_cast<float>(-magnitude * fraction));
    }
  }
  std::ranges::sort(values);
  return at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kFloat).clone();
}

void AdamW8bitParamState::lay_out_as(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  const at::IntArrayRef strides = parameter.strides();
  for (at::Tensor* average : {&exp_avg(), &exp_avg_sq()})
    if (average->defined()) *average = in_strides(*average, strides);
  // A shard of a parameter is 1-D, so its memory order cannot change.
  if (!exp_avg_8bit().defined() || exp_avg_8bit().strides() == strides || parameter.dim() < 2 ||
      !parameter.is_non_overlapping_and_dense())
    return;
  reorder_blocks(exp_avg_8bit(), exp_avg_scale(), strides, map_of(true, exp_avg_8bit().device()));
  reorder_blocks(exp_avg_sq_8bit(), exp_avg_sq_scale(), strides, map_of(false, exp_avg_sq_8bit().device()));
}

void AdamW8bitOptions::check() const {
  ListedBetas::check();
  require_option(eps() >= 0, kName, "eps", eps(), "0 or more");
  require_option(min_8bit_numel() >= 0, kName, "min_8bit_numel", static_cast<double>(min_8bit_numel()), "0 or more");
}

// This rank's part of one parameter in a step. Blocks are numbered within the whole parameter, except `from` in
// moments(), which is relative to first_block().
struct AdamW8bit::Work {
  const AdamW8bitOptions* options;
  AdamW8bitParamState* state;
  at::Tensor parameter, gradient;  // [held.numel()], in memory order
  const std::vector<ParameterParts::Held>* by_rank;
  Range held;
  bool is_quantized = false;

  int64_t first_block() const { return held.begin / kBlock; }
  int64_t blocks() const { return held.numel() == 0 ? 0 : (held.end + kBlock - 1) / kBlock - first_block(); }

  // New states of consecutive blocks: [blocks, 256], fp32. 0 for elements of other ranks, or past the parameter's end.
  struct Moments {
    at::Tensor average, square;
    Range own;     // this rank's elements of these blocks, relative to held.begin
    int64_t lead;  // number of elements before `own` in the first block, which belong to other ranks

    at::Tensor part(const at::Tensor& blocks) const { return blocks.view({-1}).narrow(0, lead, own.numel()); }
    std::array<at::Tensor, 2> scales() const { return {average.abs().amax(1), square.amax(1)}; }
  };
  Moments moments(int64_t from, int64_t count) const {
    const int64_t begin = (first_block() + from) * kBlock;
    const Range range{std::max(begin, held.begin) - held.begin,
                      std::min(begin + count * kBlock, held.end) - held.begin};
    Moments made{{}, {}, range, held.begin + range.begin - begin};
    auto in_blocks = [&](const at::Tensor& elements, double padding) {
      const at::Tensor own = elements.narrow(0, range.begin, range.numel());
      if (range.numel() == count * kBlock) return own.view({count, kBlock});
      at::Tensor padded = at::full({count, kBlock}, padding, own.options());
      made.part(padded).copy_(own);
      return padded;
    };
    auto old = [&](const at::Tensor& codes, const at::Tensor& scales, bool is_signed) {
      const Map& map = map_of(is_signed, codes.device());
      return dequantized(in_blocks(in_memory_order(codes), static_cast<double>(map.zero)),
                         scales.narrow(0, from, count), map);
    };
    at::Tensor g = in_blocks(gradient, 0).to(at::kFloat);
    if (!options->decoupled() && options->weight_decay() != 0)
      g = g + in_blocks(parameter, 0).to(at::kFloat) * options->weight_decay();
    made.average =
        old(state->exp_avg_8bit(), state->exp_avg_scale(), true).mul_(options->beta1()).add_(g, 1 - options->beta1());
    made.square = old(state->exp_avg_sq_8bit(), state->exp_avg_sq_scale(), false)
                      .mul_(options->beta2())
                      .addcmul_(g, g, 1 - options->beta2());
    return made;
  }

  void update(const at::Tensor& own, const at::Tensor& average, const at::Tensor& square) const {
    const auto t = static_cast<double>(state->step());
    const double correction1 = 1 - std::pow(options->beta1(), t), correction2 = 1 - std::pow(options->beta2(), t);
    const at::Tensor values = own.to(at::toOpMathType(own.scalar_type()));  // no copy if `own` is fp32 or fp64
    if (options->decoupled()) values.mul_(1 - options->lr() * options->weight_decay());
    values.addcdiv_(average, square.sqrt().div_(std::sqrt(correction2)).add_(options->eps()),
                    -options->lr() / correction1);
    if (!values.is_same(own)) own.copy_(values);
  }

  void step_in_fp32() const {
    at::Tensor g = gradient.to(at::kFloat);
    if (!options->decoupled() && options->weight_decay() != 0)
      g = g + parameter.to(at::kFloat) * options->weight_decay();
    const at::Tensor average = in_memory_order(state->exp_avg()), square = in_memory_order(state->exp_avg_sq());
    average.mul_(options->beta1()).add_(g, 1 - options->beta1());
    square.mul_(options->beta2()).addcmul_(g, g, 1 - options->beta2());
    update(parameter, average, square);
  }
};

AdamW8bit::Work AdamW8bit::work_of(const at::Tensor& parameter, const AdamW8bitOptions& options, bool has_gradient) {
  const NamedShard shard = parts().of(parameter);
  int64_t whole_numel = 1;
  for (const int64_t size : shard.sizes) whole_numel *= size;
  Work work{&options, nullptr, in_memory_order(parameter.detach()), {}, &parts().by_rank(parameter), shard.held};
  if (!has_gradient) return work;
  work.state = &state_of(parameter);
  AdamW8bitParamState& state = *work.state;
  state.lay_out_as(parameter);
  // An existing state keeps its format, even if min_8bit_numel changes.
  work.is_quantized = state.exp_avg_8bit().defined() ||
                      (!state.exp_avg().defined() && whole_numel > 0 && whole_numel >= options.min_8bit_numel());
  work.gradient = parameter.grad().defined() ? in_memory_order(laid_out_as(parameter.grad(), parameter.detach()))
                                             : at::zeros_like(work.parameter);
  state.step(state.step() + 1);
  if (!work.is_quantized && !state.exp_avg().defined()) {
    state.exp_avg(at::zeros_like(parameter, parameter.options().dtype(at::kFloat)));
    state.exp_avg_sq(at::zeros_like(parameter, parameter.options().dtype(at::kFloat)));
  } else if (work.is_quantized && !state.exp_avg_8bit().defined()) {
    const auto options_of_codes = parameter.options().requires_grad(false).dtype(at::kByte);
    state.exp_avg_8bit(at::zeros_like(parameter, options_of_codes).fill_(map_of(true, parameter.device()).zero));
    state.exp_avg_sq_8bit(at::zeros_like(parameter, options_of_codes).fill_(map_of(false, parameter.device()).zero));
    state.exp_avg_scale(at::zeros({work.blocks()}, options_of_codes.dtype(at::kFloat)));
    state.exp_avg_sq_scale(at::zeros({work.blocks()}, options_of_codes.dtype(at::kFloat)));
  }
  return work;
}

// For each block that is split between ranks, returns the maximum of its scales over the ranks. Includes blocks of fp32
// states, as zeros: a rank without elements of a parameter may not know whether the parameter's state is quantized.
AdamW8bit::SharedScales AdamW8bit::shared_scales(const std::vector<Work>& all) const {
  if (!parts().are_cut()) return {};
  std::set<std::pair<size_t, int64_t>> shared;
  for (size_t i = 0; i < all.size(); ++i)
    for (const auto& held : *all[i].by_rank)
      if (all[i].state != nullptr && held.range.numel() > 0 && held.range.begin % kBlock != 0)
        shared.insert({i, held.range.begin / kBlock});
  if (shared.empty()) return {};
  at::Tensor largest =
      at::zeros({static_cast<int64_t>(shared.size()), 2}, at::TensorOptions(at::kCPU).dtype(at::kFloat));
  int64_t row = 0;
  for (const auto& [index, block] : shared) {
    const Work& work = all[index];
    const int64_t from = block - work.first_block();
    if (work.is_quantized && from >= 0 && from < work.blocks()) {
      const auto [average, square] = work.moments(from, 1).scales();
      largest[row][0].copy_(average[0]);
      largest[row][1].copy_(square[0]);
    }
    ++row;
  }
  largest = reduce_to_host(*parts().comm(), largest, ReduceOp::kMax, "the scales of shared blocks");
  SharedScales scales;
  const auto values = largest.accessor<float, 2>();
  row = 0;
  for (const auto& key : shared) {
    scales[key] = {values[row][0], values[row][1]};
    ++row;
  }
  return scales;
}

at::Tensor AdamW8bit::step(LossClosure closure) {
  at::Tensor loss = loss_of(closure);
  at::NoGradGuard no_grad;
  const TraceSpan span(SpanKind::kOptimizer, "AdamW8bit");
  require_steppable();
  const auto [parameters, options] = all_parameters();
  const std::vector<bool> used = parts().have_gradients(parameters);
  std::vector<Work> all;
  for (size_t i = 0; i < parameters.size(); ++i) all.push_back(work_of(parameters[i], *options[i], used[i]));
  const SharedScales shared = shared_scales(all);
  for (size_t i = 0; i < all.size(); ++i) {
    const Work& work = all[i];
    if (work.state == nullptr) continue;
    if (work.held.numel() == 0) {
      note_write(parameters[i]);  // other ranks write to this parameter, and ranks compare their writes
      continue;
    }
    if (!work.is_quantized) {
      work.step_in_fp32();
      continue;
    }
    const at::Device device = work.parameter.device();
    for (int64_t from = 0; from < work.blocks(); from += kChunkBlocks) {
      const int64_t count = std::min(kChunkBlocks, work.blocks() - from);
      const Work::Moments made = work.moments(from, count);
      auto [average_scale, square_scale] = made.scales();
      for (const int64_t edge : {from, from + count - 1}) {
        if (const auto found = shared.find({i, work.first_block() + edge}); found != shared.end()) {
          average_scale[edge - from].fill_(found->second.first);
          square_scale[edge - from].fill_(found->second.second);
        }
      }
      work.update(work.parameter.narrow(0, made.own.begin, made.own.numel()), made.part(made.average),
                  made.part(made.square));
      auto keep = [&](const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& values,
                      const at::Tensor& new_scales, bool is_signed) {
        scales.narrow(0, from, count).copy_(new_scales);
        in_memory_order(codes)
            .narrow(0, made.own.begin, made.own.numel())
            .copy_(made.part(quantized(values, new_scales, map_of(is_signed, device))));
      };
      keep(work.state->exp_avg_8bit(), work.state->exp_avg_scale(), made.average, average_scale, true);
      keep(work.state->exp_avg_sq_8bit(), work.state->exp_avg_sq_scale(), made.square, square_scale, false);
    }
  }
  return loss;
}

}  // namespace tessera
