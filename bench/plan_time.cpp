// Compares predicted with measured step times. Calibrates this machine, and trains small models in fp32 under DDP, OSS
// + SDP and FSDP on thread ranks. Then predicts the same constructor and step from a dry run.
//
//   plan_time [--ranks 2] [--steps 20] [--rounds 3] [--quick] [--operators] [--speed speed.json] [--only "fsdp, gpt"]
//   plan_time --speed speed.json --link 1Gbit [--latency 50us] --json   # under a launcher, one rank per host
//   plan_time --scale                                                   # 70 billion parameters on 65,536 ranks
//
// Each round calibrates, predicts with this calibration, and trains, so that a change in the machine's speed affects
// both times. The first ratio is predicted / measured time (the slowest rank's median): below 1, the prediction is too
// fast. The second ratio is of processor times of a rank's thread, which depend less on other load. Ratios are medians
// of rounds. With --speed, all predictions use that file. More ranks than cores require --speed.
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <tessera/optim/fused_optimizers.h>
#include <tessera/plan.h>
#include <tessera/plan/decoder.h>
#include <tessera/plan/dry_run.h>
#include <tessera/plan/machine_speed.h>
#include <tessera/plan/planned_model.h>
#include <tessera/plan/step_time.h>
#include <tessera/tessera.h>
#include "core/layout/deferred.h"
#include "number_argument.h"
#include "plan/calibrate/calibrate.h"
#include "plan/calibrate/calibrate_operators.h"
#include "plan/calibrate/processor_time.h"
#include "plan/simulate/collective_flow.h"

namespace {

using namespace tessera;
using namespace tessera::internal;
using Clock = std::chrono::steady_clock;

struct Options {
  int ranks = 2;
  int steps = 20;
  int rounds = 3;
  bool quick = false;
  bool operators = false;
  bool json = false;
  bool scale = false;
  std::string speed, link, latency, only;
};

struct Case {
  std::string name;
  DecoderOptions model;
  int stage;
};

struct Measured {
  double median_s = 0;
  double least_s = 0;
  double wait_s = 0;       // time in waits per step, maximum over ranks
  double processor_s = 0;  // processor time per step, mean over the ranks' threads
};

const char* name_of_stage(int stage) { return stage == 0 ? "ddp" : stage == 2 ? "sdp" : "fsdp"; }

std::string text_of(const std::string& model, int stage) { return std::string(name_of_stage(stage)) + ", " + model; }

auto make_model(const Case& each, const std::shared_ptr<Communicator>& comm) {
  ZeroOptions options{.stage = each.stage};
  options.fsdp.auto_wrap = wrap_modules<DecoderBlockImpl>();
  const auto build = [&] {  // locked: all ranks draw from the process's generator
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

// Trains on every rank. Returns times of the slowest rank (see Measured), equal on all ranks. Collective.
Measured measure_on(const std::shared_ptr<Communicator>& comm, const Case& each, const Options& options) {
  at::set_num_threads(1);
  auto model = make_model(each, comm);
  for (int i = 0; i < std::min(3, options.steps); ++i) train(each, model);
  const double waited_s = comm->traffic().wait_s, processor_began_s = thread_processor_s();
  std::vector<double> seconds;
  for (int i = 0; i < options.steps; ++i) {
    const auto begin = Clock::now();
    train(each, model);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  const at::Tensor processor = torch::tensor({(thread_processor_s() - processor_began_s) / options.steps}, at::kDouble);
  seconds.push_back((comm->traffic().wait_s - waited_s) / options.steps);
  comm->all_reduce(processor, ReduceOp::kAverage, "processor seconds").wait();
  const at::Tensor slowest = torch::tensor(seconds, at::kDouble);
  comm->all_reduce(slowest, ReduceOp::kMax, "seconds").wait();
  const at::Tensor steps = slowest.narrow(0, 0, options.steps);
  return {steps.median().item<double>(), steps.min().item<double>(), slowest[options.steps].item<double>(),
          processor.item<double>()};
}

Measured measure(const Case& each, const Options& options) {
  Measured result;
  run_ranks(options.ranks, [&](const std::shared_ptr<Communicator>& comm) {
    const Measured measured = measure_on(comm, each, options);
    if (comm->rank() == 0) result = measured;
  });
  return result;
}

StepTime predict(const Case& each, const Options& options, const MachineSpeed& speed) {
  at::set_num_threads(1);
  std::vector<RunRecord> records;
  for (int rank = 0; rank < options.ranks; ++rank)
    records.push_back(dry_run([&](const std::shared_ptr<Communicator>& comm) { return make_model(each, comm); },
                              [&](auto& model) { train(each, model); }, {.world_size = options.ranks, .rank = rank}));
  return predict_step(records, speed);
}

// Prints the predicted and the recorded seconds of each kernel in a step, the largest difference first.
void print_operators(const Case& each, const Options& options, const MachineSpeed& speed) {
  struct Seconds {
    double measured_s = 0, predicted_s = 0;
    int count = 0;
  };
  std::map<std::string, Seconds> by_name;
  Seconds kernels, beside, exchanged;
  run_ranks(options.ranks, [&](const std::shared_ptr<Communicator>& comm) {
    at::set_num_threads(1);
    const RunRecord record =
        record_run([&](const std::shared_ptr<Communicator>& group) { return make_model(each, group); },
                   [&](auto& model) { train(each, model); }, comm, 4);
    if (comm->rank() != 0) return;
    for (const RecordedOperator& op : record.operators) {
      if (op.step < 2) continue;
      Seconds& sum = by_name[op.name];
      const double measured_s = (speed.cores > 0 ? op.processor_s : op.seconds) / 3;
      const double predicted_s = (speed.seconds_of(op) - speed.operator_s) / 3;
      for (Seconds* each_sum : {&sum, &kernels})
        each_sum->measured_s += measured_s, each_sum->predicted_s += predicted_s, ++each_sum->count;
      beside.predicted_s += speed.operator_s / 3;
    }
  });
  const RunRecord dry = dry_run([&](const std::shared_ptr<Communicator>& comm) { return make_model(each, comm); },
                                [&](auto& model) { train(each, model); }, {.world_size = options.ranks});
  for (const RecordedCollective& collective : dry.collectives) {  // a run with data does not record collectives
    if (collective.step != 2) continue;
    exchanged.predicted_s += work_of(collective).seconds(speed.within_host);
    ++exchanged.count;
  }
  std::vector<std::pair<std::string, Seconds>> all(by_name.begin(), by_name.end());
  std::ranges::sort(all, std::ranges::greater{},
                    [](const auto& one) { return std::abs(one.second.predicted_s - one.second.measured_s); });
  for (size_t i = 0; i < std::min<size_t>(all.size(), 6); ++i)
    std::printf("%36s %8.2f ms in kernels, predicted %8.2f (%d calls)\n", all[i].first.c_str(),
                all[i].second.measured_s * 1e3, all[i].second.predicted_s * 1e3, all[i].second.count / 3);
  std::printf("%36s %8.2f ms in kernels, predicted %8.2f; beside them predicted %.2f, in %d collectives %.2f\n",
              "a step", kernels.measured_s * 1e3, kernels.predicted_s * 1e3, beside.predicted_s * 1e3, exchanged.count,
              exchanged.predicted_s * 1e3);
}

// Returns the cases whose name contains `only`.
std::vector<Case> cases(const std::string& only) {
  std::vector<Case> all;
  for (const char* model : {"gpt:layers=2,width=128,heads=4,vocab=512,sequence=64,batch=2",
                            "gpt:layers=4,width=256,heads=4,vocab=2000,sequence=128,batch=4",
                            "gpt:layers=6,width=384,heads=6,vocab=256,sequence=128,batch=4",
                            "llama:layers=4,width=512,heads=8,vocab=1000,sequence=64,batch=1"})
    for (const int stage : {0, 2, 3})
      if (text_of(model, stage).find(only) != std::string::npos) all.push_back({model, decoder_of(model), stage});
  if (all.empty()) throw std::invalid_argument("--only '" + only + "' is in none of the cases");
  return all;
}

Options options_of(int argc, char** argv) {
  Options options;
  const std::map<std::string, bool*> switches = {{"--quick", &options.quick},
                                                 {"--operators", &options.operators},
                                                 {"--json", &options.json},
                                                 {"--scale", &options.scale}};
  const std::map<std::string, int*> numbers = {
      {"--ranks", &options.ranks}, {"--steps", &options.steps}, {"--rounds", &options.rounds}};
  const std::map<std::string, std::string*> texts = {{"--speed", &options.speed},
                                                     {"--link", &options.link},
                                                     {"--latency", &options.latency},
                                                     {"--only", &options.only}};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (const auto one = switches.find(flag); one != switches.end()) {
      *one->second = true;
    } else if (const auto number = numbers.find(flag); number != numbers.end() && i + 1 < argc) {
      *number->second = number_argument(argc, argv, ++i, 0);
    } else if (const auto text = texts.find(flag); text != texts.end() && i + 1 < argc) {
      *text->second = argv[++i];
    } else {
      throw std::invalid_argument(
          "'" + flag +
          "', expected --ranks N, --steps N, --rounds N, --quick, --operators, --json, --scale, "
          "--speed FILE, --link RATE, --latency TIME or --only TEXT");
    }
  }
  return options;
}

void print_speed(const MachineSpeed& speed) {
  std::printf(
      "%d cores; an operator %.1f us, times within %.0f %%; a collective %.0f us, %.2f GB/s, reduced %.2f; waking up "
      "%.0f us; by TCP %.0f us, %.2f GB/s\n",
      speed.cores, speed.operator_s * 1e6, speed.jitter * 100, speed.within_host.latency_s * 1e6,
      speed.within_host.bytes_per_s * 1e-9, speed.within_host.reduced_bytes_per_s * 1e-9, speed.wake_s * 1e6,
      speed.tcp.latency_s * 1e6, speed.tcp.bytes_per_s * 1e-9);
}

// Compares times on ranks that are threads of this process. Calibration and training alternate.
void run(const Options& options) {
  if (options.json || !options.link.empty() || !options.latency.empty())
    throw std::invalid_argument("--json, --link and --latency are for ranks that a launcher starts");
  double load = 0;
  if (::getloadavg(&load, 1) != 1) load = -1;
  std::printf("%u processors, load %.2f before; %d ranks, %d steps, %d rounds\n", std::thread::hardware_concurrency(),
              load, options.ranks, options.steps, options.rounds);
  const std::vector<Case> all = cases(options.only);
  std::vector<std::vector<double>> ratios(all.size()), measured_s(all.size()), predicted_s(all.size()),
      processor_ratios(all.size());
  for (int round = 0; round < options.rounds; ++round) {
    const MachineSpeed speed =
        options.speed.empty() ? calibrate({.ranks = options.ranks, .quick = options.quick}) : read_speed(options.speed);
    print_speed(speed);
    for (size_t i = 0; i < all.size(); ++i) {
      const Measured measured = measure(all[i], options);
      const StepTime predicted = predict(all[i], options, speed);
      const double median_s = measured.median_s, total_s = predicted.total_s;
      processor_ratios[i].push_back(predicted.processor_s / measured.processor_s);
      measured_s[i].push_back(median_s), predicted_s[i].push_back(total_s), ratios[i].push_back(total_s / median_s);
      if (options.operators && round + 1 == options.rounds) print_operators(all[i], options, speed);
    }
  }
  std::printf("\nmeasured ms  predicted   ratio   from    to  processor  of\n");
  std::vector<double> errors, processor_errors;
  for (size_t i = 0; i < all.size(); ++i) {
    const double ratio = median_of(ratios[i]);
    errors.push_back(std::abs(ratio - 1) * 100);
    const double processor_ratio = median_of(processor_ratios[i]);
    processor_errors.push_back(std::abs(processor_ratio - 1) * 100);
    std::printf("%11.2f %10.2f %7.2f %6.2f %5.2f %10.2f  %s\n", median_of(measured_s[i]) * 1e3,
                median_of(predicted_s[i]) * 1e3, ratio, *std::ranges::min_element(ratios[i]),
                *std::ranges::max_element(ratios[i]), processor_ratio, text_of(all[i].name, all[i].stage).c_str());
  }
  std::ranges::sort(errors);
  std::ranges::sort(processor_errors);
  std::printf("\nerror: median %.0f %%, worst %.0f %%; of processor time median %.0f %%, worst %.0f %%\n",
              errors[errors.size() / 2], errors.back(), processor_errors[processor_errors.size() / 2],
              processor_errors.back());
}

// Runs one rank of a launcher, which is alone on its host.
void run_launched(const Options& options) {
  if (options.speed.empty()) throw std::invalid_argument("ranks that a launcher has started need --speed");
  const auto comm = init();
  MachineSpeed speed = read_speed(options.speed);
  speed.ranks_per_host = 1;
  speed.shares_cores_between_hosts = true;  // network namespaces of one machine
  if (!options.link.empty()) speed.between_hosts.bytes_per_s = bytes_per_s_of_text(options.link);
  if (!options.latency.empty()) speed.between_hosts.latency_s = seconds_of_text(options.latency);
  nlohmann::json result;
  std::vector<Measured> measured;  // must precede the first dry run, which replaces the allocator
  const std::vector<Case> all = cases(options.only);
  for (const Case& each : all) measured.push_back(measure_on(comm, each, options));
  if (comm->rank() != 0) return;
  Options of_world = options;
  of_world.ranks = comm->size();
  for (size_t i = 0; i < measured.size(); ++i) {
    const Case& each = all[i];
    const StepTime time = predict(each, of_world, speed);
    result["cases"].push_back({{"model", each.name},
                               {"stage", name_of_stage(each.stage)},
                               {"measured_ms", measured[i].median_s * 1e3},
                               {"wait_ms", measured[i].wait_s * 1e3},
                               {"predicted_ms", time.total_s * 1e3},
                               {"exposed_ms", time.exposed_s * 1e3},
                               {"ratio", time.total_s / measured[i].median_s}});
  }
  std::printf("%s\n", result.dump().c_str());
}

// Measures the planner's time for one dry run of one rank of a large training.
void run_scale() {
  const auto model = planned_decoder(
      decoder_of("llama:layers=80,width=8192,heads=64,kv_heads=8,mlp=28672,vocab=128256,sequence=8192"));
  const auto begin = Clock::now();
  const RunRecord record = model->run({.stage = 3, .bf16 = true}, 65536, 17).record;
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  std::printf("70 billion parameters on 65536 ranks: %.1f s, %zu operators, this process took %.0f MiB at most\n",
              seconds, record.operators.size(), static_cast<double>(usage.ru_maxrss) / 1024);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = options_of(argc, argv);
    if (options.scale) {
      run_scale();
    } else if (launched()) {
      run_launched(options);
    } else {
      run(options);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plan_time: %s\n", error.what());
    return 1;
  }
}
