#include "plan/calibrate/calibrate.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/linalg_lstsq.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <tessera/launch.h>
#include "core/runtime/require.h"
#include "plan/calibrate/calibrate_operators.h"
#include "plan/calibrate/processor_time.h"
#include "plan/calibrate/rank_timer.h"
#include "plan/record/recorder.h"
#include "plan/simulate/collective_flow.h"

namespace tessera::internal {
namespace {

// Runs the measurements on the thread of one rank. All ranks must call the same functions concurrently.
class Bench {
 public:
  Bench(std::shared_ptr<Communicator> comm, const CalibrationOptions& options)
      : comm_(comm), options_(options), timer_(std::move(comm), options) {}

  MachineSpeed measure(const std::vector<TrainedCollectives>& collectives) {
    MachineSpeed speed;
    if (timer_.by_processor()) speed.cores = available_cores();
    if (comm_->size() > 1) speed.within_host = link();
    timer_.say("operators where they stand in training steps");
    OperatorSpeeds seen =
        measure_operators(comm_, options_.quick, timer_.by_processor() ? &speed.within_host : nullptr, collectives);
    speed.jitter = std::min(seen.jitter, 1.0);
    speed.operators = std::move(seen.operators);
    speed.operator_s = seen.between_s;
    c10::InferenceMode quiet;
    const auto set = [&](auto& curves, WorkClass work, SpeedCurve curve) {
      curves[static_cast<size_t>(work)] = std::move(curve);
    };
    set(speed.work, WorkClass::kMemory, memory(speed.operator_s));
    set(speed.work, WorkClass::kMatmul, matmul(at::kFloat, speed.operator_s));
    set(speed.work_16bit, WorkClass::kMatmul, matmul(at::kBFloat16, speed.operator_s));
    set(speed.work, WorkClass::kAttention, attention(speed.operator_s));
    set(speed.work, WorkClass::kConvolution, convolution(speed.operator_s));
    if (comm_->size() > 1) {
      speed.lost_to_communication = lost();
      speed.wake_s = wake();
    }
    return speed;
  }

  // Measures the link between ranks without shared memory: wall-clock latency, and bytes per second of processor time.
  LinkSpeed tcp() const {
    const auto process_s = [&](const std::function<void()>& call) {
      return timer_.processor_seconds_of(call, &process_processor_s) / comm_->size();
    };
    LinkSpeed found = fit(process_s, 1 << 16);
    const at::Tensor full = at::zeros({comm_->size()}), shard = at::zeros({1});
    found.latency_s = timer_.seconds_of([&] { comm_->all_gather(full, shard).wait(); });
    return found;
  }

 private:
  // Returns a curve through one point for each size. make(size) returns the amount of work of a call, and the call.
  // Subtracts the fixed cost of an operator, `operator_s`, from each time. If noise makes a point faster than the
  // previous point, which has less work, uses the time of the previous point.
  SpeedCurve curve_of(const std::string& what, double operator_s, const std::vector<int64_t>& sizes, auto make) const {
    timer_.say(what);
    std::vector<std::pair<double, double>> points;
    double seconds = 1e-9;
    for (const int64_t size : sizes) {
      const auto [amount, call] = make(size);
      seconds = std::max(timer_.work_seconds_of(call) - operator_s, seconds);
      points.emplace_back(amount, seconds);
    }
    return SpeedCurve(std::move(points));
  }

  SpeedCurve memory(double operator_s) const {
    return curve_of("memory", operator_s, {1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22}, [](int64_t numel) {
      const at::Tensor a = at::ones({numel}), b = at::ones({numel});
      return std::pair(3.0 * 4 * static_cast<double>(numel), [=] { at::add(a, b); });
    });
  }

  SpeedCurve matmul(at::ScalarType dtype, double operator_s) const {
    std::vector<int64_t> sizes{32, 64, 128, 256, 512};
    if (!options_.quick) sizes.push_back(1024);
    return curve_of(std::string("matrix products in ") + c10::toString(dtype), operator_s, sizes, [=](int64_t n) {
      const at::Tensor a = at::ones({n, n}, dtype), b = at::ones({n, n}, dtype);
      return std::pair(2.0 * static_cast<double>(n * n * n), [=] { at::mm(a, b); });
    });
  }

  SpeedCurve attention(double operator_s) const {
    constexpr int64_t kHeads = 6, kFeatures = 64;
    return curve_of("attention", operator_s, {32, 128, 512}, [](int64_t length) {
      const at::Tensor x = at::ones({2, kHeads, length, kFeatures});
      const auto flop = static_cast<double>(8 * kHeads * length * length * kFeatures);  // counted as in flop.cpp
      return std::pair(flop, [=] { at::scaled_dot_product_attention(x, x, x, {}, 0.0, /*is_causal=*/true); });
    });
  }

  SpeedCurve convolution(double operator_s) const {
    constexpr int64_t kSide = 32;
    return curve_of("convolutions", operator_s, {4, 16, 64}, [](int64_t channels) {
      const at::Tensor x = at::ones({4, channels, kSide, kSide}), weight = at::ones({channels, channels, 3, 3});
      const auto flop = static_cast<double>(2 * x.numel() * channels * 3 * 3);
      return std::pair(flop, [=] { at::conv2d(x, weight, {}, 1, 1); });
    });
  }

  LinkSpeed link() const {
    return fit([&](const std::function<void()>& call) { return timer_.work_seconds_of(call); }, 1 << 12);
  }

  // Fits a link's latency and two speeds to the times of collectives of `least_bytes` or more. Minimizes the relative
  // errors of the model seconds = operations * latency + copied * g + summed * (r - g). g and r are the seconds of a
  // copied byte and of a reduced byte. work_of() returns the number of operations, and the bytes copied and summed.
  LinkSpeed fit(const std::function<double(const std::function<void()>&)>& measure, int64_t least_bytes) const {
    std::vector<double> rows, ones;
    for (int64_t bytes = least_bytes; bytes <= (options_.quick ? 1 << 22 : 1 << 24); bytes *= 8) {
      timer_.say("collectives of " + std::to_string(bytes) + " bytes");
      const int64_t part = bytes / 4 / comm_->size();
      const at::Tensor full = at::zeros({part * comm_->size()}), shard = at::zeros({part});
      const auto add = [&](const char* operation, double seconds) {
        const CollectiveWork work = work_of({operation, "", comm_->size(), static_cast<int64_t>(full.nbytes())});
        for (const double each : {work.operations, work.copied_bytes - work.summed_bytes, work.summed_bytes})
          rows.push_back(each / seconds);
        ones.push_back(1);
      };
      add("all-gather", measure([&] { comm_->all_gather(full, shard).wait(); }));
      add("reduce-scatter", measure([&] { comm_->reduce_scatter(shard, full).wait(); }));
      add("all-reduce", measure([&] { comm_->all_reduce(full).wait(); }));
    }
    const auto count = static_cast<int64_t>(ones.size());
    const at::Tensor a = at::tensor(rows, at::kDouble).view({count, 3}), b = at::tensor(ones, at::kDouble);
    // Scales the columns, because latencies and times of bytes differ by orders of magnitude.
    const at::Tensor scale = a.norm(2, {0}, false);
    const at::Tensor found = std::get<0>(at::linalg_lstsq(a / scale, b.unsqueeze(1))).squeeze(1) / scale;
    const auto at_least = [&](int64_t i, double least) { return std::max(found[i].item<double>(), least); };
    constexpr double kLeastPerByte = 1e-13;
    return {at_least(0, 0), 1 / at_least(1, kLeastPerByte), 1 / at_least(2, kLeastPerByte)};
  }

  // Starts all-reduces late on rank 0, so that other ranks sleep. Returns the median delay of the first that wakes up.
  double wake() const {
    timer_.say("how long a rank takes to wake up");
    constexpr double kLateSeconds = 3e-3;  // longer than poll_time(), after which a waiting rank sleeps
    const at::Tensor one = at::zeros({1});
    std::vector<double> seconds;
    for (int i = 0; i < (options_.quick ? 20 : 100); ++i) {
      comm_->barrier("calibration");
      const double began_s = wall_clock_s();
      while (comm_->rank() == 0 && wall_clock_s() - began_s < kLateSeconds) continue;
      comm_->all_reduce(one).wait();
      // Ranks are threads of one process, so their times are comparable.
      const double ended_s = wall_clock_s();
      const at::Tensor others = at::zeros({comm_->size()}, at::kDouble);
      comm_->all_gather(others, at::tensor({ended_s}, at::kDouble)).wait();
      seconds.push_back((others.narrow(0, 1, comm_->size() - 1).min() - others[0]).item<double>());
    }
    return std::max(median_of(std::move(seconds)), 0.0);
  }

  // Returns the delay of matrix products by a concurrent all-reduce, as a share (0 to 1) of the time of the all-reduce.
  double lost() const {
    timer_.say("compute beside collectives");
    const at::Tensor full = at::zeros({options_.quick ? 1 << 20 : 1 << 22});
    const at::Tensor x = at::ones({256, 256});
    const double communication_s = timer_.seconds_of([&] { comm_->all_reduce(full).wait(); });
    const double product_s = timer_.seconds_of([&] { at::mm(x, x); });
    const int products = static_cast<int>(std::ceil(2 * communication_s / product_s));
    const auto multiply = [&] {
      for (int i = 0; i < products; ++i) at::mm(x, x);
    };
    const double alone_s = timer_.seconds_of(multiply);
    const double both_s = timer_.seconds_of([&] {
      Pending pending = comm_->all_reduce(full);
      multiply();
      pending.wait();
    });
    return std::clamp((both_s - alone_s) / communication_s, 0.0, 1.0);
  }

  const std::shared_ptr<Communicator> comm_;
  const CalibrationOptions& options_;
  const RankTimer timer_;
};

}  // namespace

MachineSpeed calibrate(const CalibrationOptions& options) {
  require(options.ranks >= 1 && options.threads >= 1, "calibration with ", options.ranks, " ranks of ", options.threads,
          " threads, expected 1 or more of each");
  MachineSpeed speed;
  Recorder::make(/*with_data=*/true);  // installs the recorder's allocator before threads of ranks start
  const std::vector<TrainedCollectives> collectives = collectives_of_trainings(options.ranks, options.quick);
  run_ranks(options.ranks, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(options.threads);
    const int rank = comm->rank();
    MachineSpeed measured = Bench(std::move(comm), options).measure(collectives);
    if (rank == 0) speed = std::move(measured);
  });
  if (options.ranks == 1) return speed;
  if (options.progress) options.progress("collectives by TCP");
  run_ranks(options.ranks,
            [&](std::shared_ptr<Communicator> comm) {
              at::set_num_threads(options.threads);
              const int rank = comm->rank();
              const LinkSpeed tcp = Bench(std::move(comm), options).tcp();
              if (rank == 0) speed.tcp = tcp;
            },
            {.peer_memory = false});
  return speed;
}

}  // namespace tessera::internal
