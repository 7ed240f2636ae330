#include "plan/calibrate/calibrate.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/runtime/require.h"
#include "plan/calibrate/calibrate_operators.h"
#include "plan/calibrate/rank_timer.h"

namespace tessera::internal {
namespace {

struct Exchanged {
  std::function<Pending()> start;
  double sent_bytes;
};

constexpr int kCalls = 15, kQuickCalls = 5;  // timed calls; fewer might all fit into a rate-limited link's burst

// Returns the median wall-clock time of several calls, averaged over the ranks.
double median_s(const RankTimer& timer, const std::function<void()>& call) {
  std::vector<double> seconds;
  for (int i = 0; i < (timer.options().quick ? kQuickCalls : kCalls); ++i) seconds.push_back(timer.once_s(call));
  return timer.mean(median_of(std::move(seconds)));
}

// Returns the processor time in which a rank sends one byte and receives one byte, averaged over the ranks.
double processor_s_per_byte(const RankTimer& timer, const Exchanged& exchanged) {
  const double process_s = timer.processor_seconds_of([&] { exchanged.start().wait(); }, &process_processor_s);
  const at::Tensor x = at::ones({256, 256});
  const double message_s = timer.seconds_of([&] { exchanged.start().wait(); });
  const double product_s = timer.seconds_of([&] { at::mm(x, x); });
  constexpr double kOverlap = 1.5;  // the duration of the products as a multiple of the messages' duration
  const int products = static_cast<int>(std::ceil(kOverlap * message_s / product_s));
  const auto multiply = [&] {
    for (int i = 0; i < products; ++i) at::mm(x, x);
  };
  // Times products without and with messages in turn, so that a drift of the processor's speed does not hide the
  // difference, which is small on a slow link.
  std::vector<double> slower_s;
  for (int pair = 0; pair < (timer.options().quick ? kQuickCalls : kCalls); ++pair) {
    const double began_s = thread_processor_s();
    const double alone_s = timer.once_s(multiply);
    // The rank's share of a core. It is below 1 if one machine simulates more hosts than it has cores.
    const double share = std::min((thread_processor_s() - began_s) / alone_s, 1.0);
    const double both_s = timer.once_s([&] {
      Pending pending = exchanged.start();
      multiply();
      pending.wait();
    });
    slower_s.push_back((both_s - alone_s) * share);
  }
  return std::max(process_s, timer.mean(median_of(std::move(slower_s)))) / exchanged.sent_bytes;
}

}  // namespace

MachineSpeed calibrate_hosts(MachineSpeed speed, const std::shared_ptr<Communicator>& comm,
                             const CalibrationOptions& options) {
  const int ranks = comm->size();
  if (ranks < 2) throw std::invalid_argument("the link between hosts, of a group of 1 rank, expected 2 or more");
  require(options.threads >= 1, "calibration with ", options.threads, " threads a rank, expected 1 or more");
  const at::Tensor known = at::tensor({speed.tcp.latency_s, speed.tcp.bytes_per_s}, at::kDouble);  // rank 0's values
  comm->broadcast(known, 0, "calibration").wait();
  const double within_machine_s = known[0].item<double>();
  if (!(known[1].item<double>() > 0))
    throw std::invalid_argument("the machine's speed lacks `tcp`, expected one that was calibrated with 2 ranks");
  at::set_num_threads(options.threads);
  const c10::InferenceMode quiet;
  const RankTimer timer(comm, options);
  timer.say("the latency between hosts");
  const at::Tensor small = at::zeros({ranks}), one = at::zeros({1});
  const double least_s = timer.seconds_of([&] { comm->all_gather(small, one).wait(); }) / std::ceil(std::log2(ranks));

  constexpr double kMostSeconds = 0.1;
  constexpr int64_t kProbeNumel = 1 << 18;
  const int64_t probe_part = std::max<int64_t>(kProbeNumel / ranks, 1);
  const at::Tensor probe = at::zeros({probe_part * ranks}), probe_shard = at::zeros({probe_part});
  const double probe_s = timer.seconds_of([&] { comm->all_gather(probe, probe_shard).wait(); });
  const double fitting = kMostSeconds / probe_s * static_cast<double>(probe.numel());
  const auto numel = static_cast<int64_t>(std::clamp(fitting, 1e4, options.quick ? 1e6 : 4e6));
  const int64_t part = std::max<int64_t>(numel / ranks, 1);
  const at::Tensor full = at::zeros({part * ranks}), shard = at::zeros({part});
  const auto sent_bytes = static_cast<double>(shard.nbytes()) * (ranks - 1);
  const Exchanged gathered{[&] { return comm->all_gather(full, shard); }, sent_bytes};
  const Exchanged reduced{[&] { return comm->reduce_scatter(shard, full); }, sent_bytes};
  timer.say("bytes a second between hosts");
  const double gather_s = median_s(timer, [&] { gathered.start().wait(); });
  timer.say("compute beside messages to other hosts");
  const double copied_s = processor_s_per_byte(timer, gathered), summed_s = processor_s_per_byte(timer, reduced);
  speed.between_hosts = {std::max(least_s - within_machine_s, 0.0), sent_bytes / std::max(gather_s - least_s, 1e-9), 0};
  speed.tcp = {within_machine_s, 1 / copied_s, 1 / std::max(copied_s, summed_s)};
  return speed;
}

}  // namespace tessera::internal
