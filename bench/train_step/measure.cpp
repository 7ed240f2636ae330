#include "measure.h"

#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include <tessera/tessera.h>
#include "trainer.h"

namespace train_step {
namespace {

using Clock = std::chrono::steady_clock;

int64_t resident_bytes(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != field) continue;
    int64_t kib = 0;
    status >> kib;
    return kib * 1024;
  }
  return 0;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Gathers one row of numbers from each rank, and reduces the columns.
class OverRanks {
 public:
  OverRanks(tessera::Communicator& comm, const std::vector<double>& own) {
    all_ = tessera::gather_to_host(comm, torch::tensor(own, torch::kFloat64), "figures");
  }
  std::vector<double> most() const { return to_vector(std::get<0>(all_.max(0))); }
  std::vector<double> mean() const { return to_vector(all_.mean(0)); }
  double of_highest(int64_t wanted, int64_t by) const {  // column `wanted` of the rank with the highest `by`
    return all_[all_.select(1, by).argmax().item<int64_t>()][wanted].item<double>();
  }

 private:
  static std::vector<double> to_vector(const at::Tensor& row) {
    return {row.const_data_ptr<double>(), row.const_data_ptr<double>() + row.numel()};
  }
  at::Tensor all_;
};

rusage used_so_far() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage;
}

nlohmann::ordered_json settings(const Options& options, int ranks) {
  nlohmann::ordered_json line = {{"model", options.model},
                                 {"wrapper", options.wrapper},
                                 {"ranks", ranks},
                                 {"batch", options.batch},
                                 {"steps", options.steps},
                                 {"warmup", options.warmup},
                                 {"threads", options.threads},
                                 {"dtype", options.dtype == at::kFloat ? "float32" : "bfloat16"},
                                 {"optimizer", options.optimizer}};
  if (options.model != "mlp") line["layers"] = options.layers, line["width"] = options.width;
  if (options.model == "gpt")
    line["heads"] = options.heads, line["context"] = options.context, line["vocabulary"] = options.vocabulary;
  return line;
}

// Runs a tiny step, which loads code (mostly libtorch's) into memory, so that this code is not counted as growth. The
// compared programs do the same (bench/compare/peer.py).
void load_code() {
  torch::nn::Linear tiny(4, 4);
  tessera::Adam adam(tiny->parameters(), torch::optim::AdamOptions(1e-3));
  tiny->forward(torch::ones({1, 4})).sum().backward();
  adam.step();
}

// This rank's traffic and resources so far.
struct Spent {
  tessera::Traffic traffic;
  double cpu_s = 0, page_faults = 0;
  static Spent so_far(const tessera::Communicator& comm) {
    return {comm.traffic(), cpu_seconds(), static_cast<double>(used_so_far().ru_minflt)};
  }
};

struct Steps {
  std::vector<double> losses;  // losses of all steps, including warm-up
  std::vector<double> step_s;
  Spent before, after;
};

Steps run_steps(const Options& options, tessera::Communicator& comm, Trainer& trainer, const Batch& batch) {
  Steps steps;
  for (int step = 0; step < options.warmup + options.steps; ++step) {
    if (step == options.warmup) {
      comm.barrier("the end of warming up");
      steps.before = Spent::so_far(comm);
    }
    const auto began = Clock::now();
    trainer.zero_grad();
    const auto loss = trainer.step(batch);
    if (step >= options.warmup) steps.step_s.push_back(std::chrono::duration<double>(Clock::now() - began).count());
    steps.losses.push_back(loss.item<double>());
  }
  steps.after = Spent::so_far(comm);
  return steps;
}

}  // namespace

double cpu_seconds() {
  const rusage usage = used_so_far();
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

nlohmann::ordered_json measure(const Options& options, const std::shared_ptr<tessera::Communicator>& comm) {
  comm->barrier("the start");  // opens connections, which use memory, before memory is measured
  load_code();
  const auto rss_before = static_cast<double>(resident_bytes("VmRSS:"));
  const Batch batch = make_batch(options, comm->rank());
  const auto trainer = make_trainer(options, comm);

  const auto [own_losses, step_s, before, after] = run_steps(options, *comm, *trainer, batch);
  const tessera::MemoryReport report = trainer->memory();
  const double steps = options.steps;
  enum { kParam, kGrad, kOptimizer, kGathered, kBucket, kRssBefore, kRssPeak, kSent, kCalls, kWait, kCpu, kFaults };
  const OverRanks figures(
      *comm, {static_cast<double>(report.shard_bytes), static_cast<double>(report.grad_bytes),
              static_cast<double>(trainer->optimizer_bytes()), static_cast<double>(report.peak_gathered_bytes),
              static_cast<double>(report.peak_bucket_bytes), rss_before, static_cast<double>(resident_bytes("VmHWM:")),
              static_cast<double>(after.traffic.sent_bytes - before.traffic.sent_bytes) / steps,
              static_cast<double>(after.traffic.collectives - before.traffic.collectives) / steps,
              (after.traffic.wait_s - before.traffic.wait_s) / steps, (after.cpu_s - before.cpu_s) / steps,
              (after.page_faults - before.page_faults) / steps});
  const auto most = figures.most(), mean = figures.mean();
  const auto slowest = OverRanks(*comm, step_s).most();
  const auto losses = OverRanks(*comm, own_losses).mean();

  auto line = settings(options, comm->size());
  const auto bytes = [](double value) { return static_cast<int64_t>(value); };
  line["step_s_median"] = median(slowest);
  line["step_s_min"] = *std::min_element(slowest.begin(), slowest.end());
  line["cpu_s"] = mean[kCpu];
  line["param_bytes"] = bytes(most[kParam]);
  line["grad_bytes"] = bytes(most[kGrad]);
  line["optimizer_bytes"] = bytes(most[kOptimizer]);
  line["peak_gathered_bytes"] = bytes(most[kGathered]);
  line["peak_bucket_bytes"] = bytes(most[kBucket]);
  line["model_bytes"] = report.unsharded_bytes;
  line["rss_before_bytes"] = bytes(figures.of_highest(kRssBefore, kRssPeak));
  line["rss_peak_bytes"] = bytes(most[kRssPeak]);
  line["sent_bytes"] = bytes(mean[kSent]);
  line["collectives"] = mean[kCalls];
  line["comm_wait_s"] = most[kWait];
  line["page_faults"] = mean[kFaults];
  line["loss"] = losses.back();
  line["param_sum"] = trainer->parameter_sum();
  line["losses"] = losses;
  line["step_s"] = slowest;
  return line;
}

}  // namespace train_step
