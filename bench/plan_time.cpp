// How far are predicted steps from measured ones? Calibrates this machine, trains small models under DDP, OSS + SDP and
// FSDP, each in fp32 on ranks that are threads, then predicts the same constructor and step from a dry run.
//
//   plan_time [--ranks 2] [--steps 20] [--quick] [--operators]
//
// The ratio is predicted by measured (median of the slowest rank): 1 is exact, below 1 too fast.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tessera/flat/deferred.h"
#include "tessera/optim/fused_optimizers.h"
#include "tessera/plan/calibrate.h"
#include "tessera/plan/decoder.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/step_time.h"
#include "tessera/tessera.h"

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

struct Options {
  int ranks = 2;
  int steps = 20;
  bool quick = false;
  bool operators = false;
};

struct Case {
  std::string name;
  DecoderOptions model;
  int stage;
};

struct Measured {
  double median_s = 0;
  double least_s = 0;
  double wait_s = 0;  // a step's, of the rank that waited longest
};

const char* name_of_stage(int stage) { return stage == 0 ? "ddp" : stage == 2 ? "sdp" : "fsdp"; }

auto make_model(const Case& each, const std::shared_ptr<Communicator>& comm) {
  ZeroOptions options{.stage = each.stage};
  options.fsdp.auto_wrap = wrap_modules<DecoderBlockImpl>();
  const auto build = [&] {  // one at a time draws from the process's generator
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    torch::manual_seed(0);
    return Decoder(each.model);
  };
  return zero<AdamW>(each.stage == 3 ? deferred(build) : build(), torch::optim::AdamWOptions(1e-3), comm, options);
}

template <class Model>
void train(const Case& each, Model& model) {
  const at::Tensor tokens = torch::zeros({each.model.batch, each.model.sequence}, at::kLong);
  model.optimizer().zero_grad();
  torch::cross_entropy_loss(model(tokens), tokens.flatten()).backward();
  model.step();
}

Measured measure(const Case& each, const Options& options) {
  Measured result;
  run_ranks(options.ranks, [&](const std::shared_ptr<Communicator>& comm) {
    at::set_num_threads(1);
    auto model = make_model(each, comm);
    for (int i = 0; i < 3; ++i) train(each, model);
    const double waited_s = comm->traffic().wait_s;
    std::vector<double> seconds;
    for (int i = 0; i < options.steps; ++i) {
      const auto begin = Clock::now();
      train(each, model);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
    seconds.push_back((comm->traffic().wait_s - waited_s) / options.steps);
    const at::Tensor slowest = torch::tensor(seconds, at::kDouble);
    comm->all_reduce(slowest, ReduceOp::kMax, "seconds").wait();
    if (comm->rank() != 0) return;
    const at::Tensor steps = slowest.narrow(0, 0, options.steps);
    result = {steps.median().item<double>(), steps.min().item<double>(), slowest[options.steps].item<double>()};
  });
  return result;
}

StepTime predict(const Case& each, const Options& options, const MachineSpeed& speed) {
  at::set_num_threads(1);
  const RunRecord record = dry_run([&](const std::shared_ptr<Communicator>& comm) { return make_model(each, comm); },
                                   [&](auto& model) { train(each, model); }, {.world_size = options.ranks});
  return predict_step(record, speed);
}

// Where the error comes from: kernels' seconds in a step of a recorded run with data beside predicted ones, the largest
// differences first.
void print_operators(const Case& each, const Options& options, const MachineSpeed& speed) {
  struct Seconds {
    double measured_s = 0, predicted_s = 0;
    int count = 0;
  };
  std::map<std::string, Seconds> by_name;
  run_ranks(options.ranks, [&](const std::shared_ptr<Communicator>& comm) {
    at::set_num_threads(1);
    const RunRecord record =
        record_run([&](const std::shared_ptr<Communicator>& group) { return make_model(each, group); },
                   [&](auto& model) { train(each, model); }, comm, 4);
    if (comm->rank() != 0) return;
    for (const RecordedOperator& op : record.operators) {
      if (op.step < 2) continue;
      Seconds& sum = by_name[op.name];
      sum.measured_s += op.seconds / 3;
      sum.predicted_s += (speed.seconds_of(op) - speed.operator_s) / 3;
      ++sum.count;
    }
  });
  std::vector<std::pair<std::string, Seconds>> all(by_name.begin(), by_name.end());
  std::ranges::sort(all, std::ranges::greater{},
                    [](const auto& one) { return std::abs(one.second.predicted_s - one.second.measured_s); });
  for (size_t i = 0; i < std::min<size_t>(all.size(), 6); ++i)
    std::printf("%36s %8.2f ms in kernels, predicted %8.2f (%d calls)\n", all[i].first.c_str(),
                all[i].second.measured_s * 1e3, all[i].second.predicted_s * 1e3, all[i].second.count / 3);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* model : {"gpt:layers=2,width=128,heads=4,vocab=512,sequence=64,batch=2",
                            "gpt:layers=4,width=256,heads=4,vocab=2000,sequence=128,batch=4",
                            "gpt:layers=6,width=384,heads=6,vocab=256,sequence=128,batch=4",
                            "llama:layers=4,width=512,heads=8,vocab=1000,sequence=64,batch=1"})
    for (const int stage : {0, 2, 3}) all.push_back({model, decoder_of(model), stage});
  return all;
}

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--quick") {
      options.quick = true;
    } else if (flag == "--operators") {
      options.operators = true;
    } else if ((flag == "--ranks" || flag == "--steps") && i + 1 < argc && std::atoi(argv[i + 1]) > 0) {
      (flag == "--ranks" ? options.ranks : options.steps) = std::atoi(argv[++i]);
    } else {
      throw std::invalid_argument("'" + flag + "', expected --ranks N, --steps N, --quick or --operators");
    }
  }
  return options;
}

void run(const Options& options) {
  double load = 0;
  if (::getloadavg(&load, 1) != 1) load = -1;
  std::printf("%u processors, load %.2f before; %d ranks, %d steps\n", std::thread::hardware_concurrency(), load,
              options.ranks, options.steps);
  const MachineSpeed speed = calibrate({.ranks = options.ranks, .quick = options.quick});
  std::printf("an operator %.1f us; link %.0f us, %.2f GB/s, reduced %.2f; %.0f %% of compute lost meanwhile\n\n",
              speed.operator_s * 1e6, speed.within_host.latency_s * 1e6, speed.within_host.bytes_per_s * 1e-9,
              speed.within_host.reduced_bytes_per_s * 1e-9, speed.lost_to_communication * 100);
  // Dry runs come last: the first of them puts its allocator before libtorch's.
  std::vector<Measured> measured;
  for (const Case& each : cases()) measured.push_back(measure(each, options));
  std::printf("measured ms    least  waiting  predicted  exposed   ratio  of\n");
  std::vector<double> errors;
  for (size_t i = 0; i < measured.size(); ++i) {
    const Case each = cases()[i];
    const StepTime time = predict(each, options, speed);
    const double ratio = time.total_s / measured[i].median_s;
    errors.push_back(std::abs(ratio - 1) * 100);
    std::printf("%11.2f %8.2f %8.2f %10.2f %8.2f %7.2f  %s, %s\n", measured[i].median_s * 1e3,
                measured[i].least_s * 1e3, measured[i].wait_s * 1e3, time.total_s * 1e3, time.exposed_s * 1e3, ratio,
                name_of_stage(each.stage), each.name.c_str());
    if (options.operators) print_operators(each, options, speed);
  }
  std::ranges::sort(errors);
  std::printf("\nerror: median %.0f %%, worst %.0f %%\n", errors[errors.size() / 2], errors.back());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(options_of(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plan_time: %s\n", error.what());
    return 1;
  }
}
