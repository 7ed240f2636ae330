#include "plan/calibrate/calibrate_operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <utility>

#include <tessera/optim/fused_optimizers.h>
#include <tessera/plan/decoder.h>
#include <tessera/plan/dry_run.h>
#include <tessera/zero.h>
#include "core/layout/deferred.h"
#include "plan/calibrate/processor_time.h"
#include "plan/simulate/collective_flow.h"

namespace tessera::internal {

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}
namespace {

constexpr int kSteps = 8;

struct TimedTraining {
  const char* model;
  int stage;
};

constexpr TimedTraining kTimedTrainings[] = {
    {"gpt:layers=3,width=32,heads=2,vocab=64,sequence=16,batch=1", 3},
    {"gpt:layers=3,width=32,heads=2,vocab=64,sequence=16,batch=1", 0},
    {"gpt:layers=2,width=64,heads=2,vocab=300,sequence=32,batch=2", 2},
    {"gpt:layers=2,width=96,heads=3,vocab=400,sequence=48,batch=2", 0},
    {"gpt:layers=2,width=160,heads=5,vocab=800,sequence=48,batch=3", 2},
    {"gpt:layers=2,width=192,heads=3,vocab=1000,sequence=64,batch=2", 3},
    {"llama:layers=2,width=192,heads=3,vocab=600,sequence=48,batch=1", 3},
    {"gpt:layers=2,width=320,heads=5,vocab=1500,sequence=96,batch=3", 0},
    {"llama:layers=2,width=448,heads=7,vocab=1500,sequence=96,batch=2", 3},
    {"gpt:layers=2,width=512,heads=8,vocab=3000,sequence=160,batch=4", 3},
    {"gpt:layers=8,width=256,heads=4,vocab=300,sequence=32,batch=1", 0},
};
constexpr size_t kQuickTrainings = 7;

auto make_training(const TimedTraining& timed, const std::shared_ptr<Communicator>& comm) {
  ZeroOptions options{.stage = timed.stage};
  options.fsdp.auto_wrap = wrap_modules<DecoderBlockImpl>();
  const auto build = [&] {
    static std::mutex mutex;  // needed because ranks are threads that share libtorch's random generator
    const std::lock_guard lock(mutex);
    return Decoder(decoder_of(timed.model));
  };
  return zero<AdamW>(timed.stage == 3 ? deferred(build) : build(), torch::optim::AdamWOptions(1e-3), comm, options);
}

template <class Training>
void train_once(const TimedTraining& timed, Training& training) {
  const DecoderOptions shape = decoder_of(timed.model);
  const at::Tensor tokens = at::zeros({shape.batch, shape.sequence}, at::kLong);
  training.optimizer().zero_grad();
  at::cross_entropy_loss(training(tokens), tokens.flatten()).backward();
  training.step();
}

// Returns the busy time of an unrecorded step: the thread's processor time, or wall-clock time without waits.
double busy_seconds(const TimedTraining& timed, const std::shared_ptr<Communicator>& comm, bool by_processor) {
  auto training = make_training(timed, comm);
  for (int i = 0; i < 2; ++i) train_once(timed, training);
  std::vector<double> seconds;
  for (int i = 0; i < 4 * kSteps; ++i) {
    const double waited_s = comm->traffic().wait_s;
    const double began_s = wall_clock_s();
    const double processor_began_s = thread_processor_s();
    train_once(timed, training);
    const double processor_s = thread_processor_s() - processor_began_s;
    const double clock_s = wall_clock_s() - began_s;
    seconds.push_back(by_processor ? processor_s : clock_s - (comm->traffic().wait_s - waited_s));
  }
  return median_of(std::move(seconds));
}

using Samples = std::map<std::string, std::vector<TimedKernel>>;

// Returns a robust estimate of the standard deviation of log(seconds), from the median distance to the median.
double spread_of(std::vector<double> seconds) {
  const double middle = median_of(seconds);
  for (double& each : seconds) each = std::abs(std::log(std::max(each, 1e-9) / std::max(middle, 1e-9)));
  constexpr double kOfNormal = 1.4826;
  return kOfNormal * median_of(std::move(seconds));
}

// Returns the mean without the largest and the smallest value. A median would ignore the slow calls that use new
// memory. These calls are rare for one kernel but frequent in a step, so a sum of medians would be below the step time.
double mean_of_most(std::vector<double> seconds) {
  std::ranges::sort(seconds);
  const std::ptrdiff_t dropped = seconds.size() > 2 ? 1 : 0;
  const double sum = std::accumulate(seconds.begin() + dropped, seconds.end() - dropped, 0.0);
  return sum / static_cast<double>(std::ssize(seconds) - 2 * dropped);
}

// Adds one sample for each kernel with FLOP or bytes: mean_of_most() of its processor times in all steps, or the median
// of its wall-clock times. Adds spread_of() of long kernels to `spreads`. Returns the number and total time of the
// kernels in a step. Skips step 1, whose kernels may differ.
std::pair<double, double> add_kernels(const RunRecord& record, bool by_processor, Samples& samples,
                                      std::vector<double>& spreads) {
  std::vector<std::vector<const RecordedOperator*>> steps(kSteps + 1);
  for (const RecordedOperator& op : record.operators)
    if (op.step >= 2) steps[static_cast<size_t>(op.step)].push_back(&op);
  double total_s = 0;
  for (size_t i = 0; i < steps[2].size(); ++i) {
    std::vector<double> seconds;
    for (size_t step = 2; step < steps.size(); ++step)
      if (i < steps[step].size() && steps[step][i]->name == steps[2][i]->name)
        seconds.push_back(by_processor ? steps[step][i]->processor_s : steps[step][i]->seconds);
    const RecordedOperator& op = *steps[2][i];
    constexpr double kWorthATimeSeconds = 2e-5;
    if (median_of(seconds) > kWorthATimeSeconds) spreads.push_back(spread_of(seconds));
    const double kernel_s = by_processor ? mean_of_most(std::move(seconds)) : median_of(std::move(seconds));
    if (op.flop > 0 || op.bytes > 0)
      samples[op.name].push_back({static_cast<double>(op.flop), static_cast<double>(op.bytes), kernel_s});
    total_s += kernel_s;
  }
  return {static_cast<double>(steps[2].size()), total_s};
}

struct Explained {
  double busy_s, kernels_s, operators;
};

// Fits two values: the time of an operator outside its kernel, and a factor that corrects kernel times for recording.
// Minimizes the relative errors of busy = factor * kernels + between * operators over all trainings.
std::pair<double, double> explain(const std::vector<Explained>& trainings) {
  double kk = 0, ko = 0, oo = 0, k = 0, o = 0;
  for (const auto& [busy_s, kernels_s, operators] : trainings) {
    const double x = kernels_s / busy_s, y = operators / busy_s;
    kk += x * x, ko += x * y, oo += y * y, k += x, o += y;
  }
  const double determinant = kk * oo - ko * ko;
  const double between_s = determinant > 0 ? (kk * o - ko * k) / determinant : 0;
  if (between_s <= 0) return {k / kk, 0};
  return {(k - ko * between_s) / kk, between_s};
}

// One point of a curve. `count` is the number of bins that were merged into the point.
struct Pool {
  double amount, seconds, count;
};

// Returns a curve whose points are the medians of the samples in each quarter octave of work. If a point has more work
// but less time than another (because of shapes, strides or noise), replaces both by their geometric mean. The larger
// time instead would slow down all larger points. Work below the smallest point takes as long as that point.
SpeedCurve curve_through(const std::vector<std::pair<double, double>>& samples) {
  constexpr double kPerOctave = 4;
  std::map<int, std::vector<std::pair<double, double>>> bins;
  for (const auto& sample : samples)
    bins[static_cast<int>(std::floor(kPerOctave * std::log2(sample.first)))].push_back(sample);
  std::vector<Pool> pools;
  for (const auto& [bin, inside] : bins) {
    std::vector<double> amounts, seconds;
    for (const auto& [amount, each_s] : inside) amounts.push_back(amount), seconds.push_back(each_s);
    Pool pool{median_of(std::move(amounts)), std::max(1e-9, median_of(std::move(seconds))), 1};
    while (!pools.empty() && pools.back().seconds > pool.seconds) {
      const Pool& slower = pools.back();
      const double count = slower.count + pool.count;
      pool = {std::exp((slower.count * std::log(slower.amount) + pool.count * std::log(pool.amount)) / count),
              std::exp((slower.count * std::log(slower.seconds) + pool.count * std::log(pool.seconds)) / count), count};
      pools.pop_back();
    }
    pools.push_back(pool);
  }
  std::vector<std::pair<double, double>> points;
  if (pools.front().amount > 1) points.emplace_back(1, pools.front().seconds);
  for (const Pool& pool : pools) points.emplace_back(pool.amount, pool.seconds);
  return SpeedCurve(std::move(points));
}

// Returns the number of FLOP that take as long as one byte. Fits the model seconds = a + b * FLOP + c * bytes to all
// kernels, by least squares of the relative errors. Returns c / b, or 0 if b or c is not above 0.
double flop_per_byte_of(const std::vector<TimedKernel>& kernels) {
  std::vector<double> rows;
  for (const auto& [flop, bytes, seconds] : kernels)
    for (const double coefficient : {1.0, flop, bytes}) rows.push_back(coefficient / std::max(seconds, 1e-9));
  const auto count = static_cast<int64_t>(kernels.size());
  const at::Tensor a = at::tensor(rows, at::kDouble).view({count, 3});
  const at::Tensor scale = a.norm(2, {0}, false);  // the norm of each column
  const at::Tensor ones = at::ones({count, 1}, at::kDouble);
  // Solves the normal equations. Adds a small ridge, because the solution is not unique if all shapes are similar.
  constexpr double kRidge = 1e-9;
  const at::Tensor scaled = a / scale;
  const at::Tensor square = scaled.t().mm(scaled) + kRidge * at::eye(3, at::kDouble);
  const at::Tensor found = at::linalg_solve(square, scaled.t().mm(ones)).squeeze(1) / scale;
  const double flop_s = found[1].item<double>(), byte_s = found[2].item<double>();
  return flop_s > 0 && byte_s > 0 ? byte_s / flop_s : 0;
}

}  // namespace

OperatorSpeed speed_through(const std::vector<TimedKernel>& kernels) {
  const bool has_flop = std::ranges::all_of(kernels, [](const TimedKernel& each) { return each.flop > 0; });
  OperatorSpeed speed{.flop_per_byte = has_flop ? flop_per_byte_of(kernels) : 0};
  std::vector<std::pair<double, double>> samples;
  for (const auto& [flop, bytes, seconds] : kernels) samples.emplace_back(speed.work_of(flop, bytes), seconds);
  speed.curve = curve_through(samples);
  return speed;
}

static at::ArrayRef<TimedTraining> trainings_of(bool quick) {
  return at::ArrayRef<TimedTraining>(kTimedTrainings).slice(0, quick ? kQuickTrainings : std::size(kTimedTrainings));
}

std::vector<TrainedCollectives> collectives_of_trainings(int ranks, bool quick) {
  std::vector<TrainedCollectives> all;
  for (const TimedTraining& timed : trainings_of(quick)) {
    const RunRecord record =
        dry_run([&](const std::shared_ptr<Communicator>& comm) { return make_training(timed, comm); },
                [&](auto& training) { train_once(timed, training); }, {.world_size = ranks});
    TrainedCollectives& of_step = all.emplace_back();
    for (const RecordedCollective& each : record.collectives)
      if (each.step == 2) of_step.push_back(each);
  }
  return all;
}

OperatorSpeeds measure_operators(const std::shared_ptr<Communicator>& comm, bool quick, const LinkSpeed* link,
                                 const std::vector<TrainedCollectives>& collectives) {
  const auto trainings = trainings_of(quick);
  const bool by_processor = link != nullptr;
  std::vector<double> spreads;
  Samples samples;
  std::vector<Explained> explained;
  for (size_t i = 0; i < trainings.size(); ++i) {
    const TimedTraining& timed = trainings[i];
    double busy_s = busy_seconds(timed, comm, by_processor);
    // Subtracts the processor time of collectives, but at most half of busy_s, to leave time for the operators.
    double exchanged_s = 0;
    for (const RecordedCollective& each : collectives[i])
      exchanged_s += by_processor ? work_of(each).seconds(*link) : 0;
    busy_s -= std::min(exchanged_s, busy_s / 2);
    const RunRecord record =
        record_run([&](const std::shared_ptr<Communicator>& group) { return make_training(timed, group); },
                   [&](auto& training) { train_once(timed, training); }, comm, kSteps);
    const auto [count, kernels_s] = add_kernels(record, by_processor, samples, spreads);
    explained.push_back({busy_s, kernels_s, count});
  }
  OperatorSpeeds speeds;
  const auto [factor, between_s] = explain(explained);
  speeds.between_s = between_s;
  if (!spreads.empty()) speeds.jitter = median_of(std::move(spreads));
  for (auto& [name, seen] : samples) {
    for (TimedKernel& kernel : seen) kernel.seconds *= factor;
    speeds.operators.emplace(name, speed_through(seen));
  }
  return speeds;
}

}  // namespace tessera::internal
