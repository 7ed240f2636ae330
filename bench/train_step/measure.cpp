#include "measure.h"

#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "tessera/tessera.h"
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

// A row of numbers from each rank.
class OverRanks {
 public:
  OverRanks(tessera::Communicator& comm, const std::vector<double>& own) {
    const auto mine = torch::tensor(own, torch::kFloat64);
    const auto all = torch::empty({comm.size() * mine.numel()}, torch::kFloat64);
    comm.all_gather(all, mine, {}, "figures").wait();
    all_ = all.view({comm.size(), mine.numel()});
  }
  std::vector<double> most() const { return to_vector(std::get<0>(all_.max(0))); }
  std::vector<double> mean() const { return to_vector(all_.mean(0)); }
  double of_highest(int64_t wanted, int64_t by) const {  // what the rank has that is highest in column `by`
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

double page_faults() { return static_cast<double>(used_so_far().ru_minflt); }

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

// What a first step brings into memory besides the model, libtorch's own code above all. Peers do the same
// (bench/compare/peer.py).
void load_code() {
  torch::nn::Linear tiny(4, 4);
  tessera::Adam adam(tiny->parameters(), torch::optim::AdamOptions(1e-3));
  tiny->forward(torch::ones({1, 4})).sum().backward();
  adam.step();
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
  comm->barrier("the start");  // connections are made before memory is looked at
  load_code();
  const auto rss_before = static_cast<double>(resident_bytes("VmRSS:"));
  const Batch batch = make_batch(options, comm->rank());
  const auto trainer = make_trainer(options, comm);

  std::vector<double> losses, step_s;
  tessera::Traffic before;
  double cpu_before = 0, faults_before = 0;
  for (int step = 0; step < options.warmup + options.steps; ++step) {
    if (step == options.warmup) {
      comm->barrier("the end of warming up");
      before = comm->traffic();
      cpu_before = cpu_seconds();
      faults_before = page_faults();
    }
    const auto began = Clock::now();
    trainer->zero_grad();
    const auto loss = trainer->step(batch);
    if (step >= options.warmup) step_s.push_back(std::chrono::duration<double>(Clock::now() - began).count());
    losses.push_back(loss.item<double>());
  }
  const double cpu_after = cpu_seconds(), faults_after = page_faults();
  const tessera::Traffic after = comm->traffic();
  const tessera::MemoryReport report = trainer->memory();
  const double steps = options.steps;
  enum Column {
    kParam,
    kGrad,
    kOptimizer,
    kGathered,
    kBucket,
    kRssBefore,
    kRssPeak,
    kSent,
    kCollectives,
    kWait,
    kCpu,
    kFaults
  };
  const OverRanks figures(
      *comm,
      {static_cast<double>(report.shard_bytes), static_cast<double>(report.grad_bytes),
       static_cast<double>(trainer->optimizer_bytes()), static_cast<double>(report.peak_gathered_bytes),
       static_cast<double>(report.peak_bucket_bytes), rss_before, static_cast<double>(resident_bytes("VmHWM:")),
       static_cast<double>(after.sent_bytes - before.sent_bytes) / steps,
       static_cast<double>(after.collectives - before.collectives) / steps, (after.wait_s - before.wait_s) / steps,
       (cpu_after - cpu_before) / steps, (faults_after - faults_before) / steps});
  const auto most = figures.most(), mean = figures.mean();
  const auto slowest = OverRanks(*comm, step_s).most();
  losses = OverRanks(*comm, losses).mean();

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
  line["collectives"] = mean[kCollectives];
  line["comm_wait_s"] = most[kWait];
  line["page_faults"] = mean[kFaults];
  line["loss"] = losses.back();
  line["param_sum"] = trainer->parameter_sum();
  line["losses"] = losses;
  line["step_s"] = slowest;
  return line;
}

}  // namespace train_step
