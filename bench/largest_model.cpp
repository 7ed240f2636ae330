// Computes the largest model that a device, a host and a disk hold, by stage and tier of offload, for fp32 parameters
// and Adam. Bytes come from the layouts. Prints the table only if small models on thread ranks report the same bytes.
//
// Also trains, saves and loads a model on the disk tier, and prints the peak host memory of each. Excludes mapped
// files, which the kernel can write to disk.
//
//   largest_model [ranks=8] [device GiB=24] [host GiB per rank=64] [disk GiB per rank=512]
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include <tessera/tessera.h>
#include "core/layout/flat_layout.h"
#include "number_argument.h"
#include "optim/state/optimizer_state.h"

namespace {

using tessera::CpuOffload;
using tessera::MemoryReport;

constexpr double kGiB = 1024.0 * 1024 * 1024;

// The memory that one rank needs. The last three fields are memory in flight on the device, in units or in shards of
// units. Their numbers do not depend on the model.
struct Need {
  double device_per_parameter = 0, host_per_parameter = 0, disk_per_parameter = 0;  // bytes
  double gathered_units = 0, bucket_units = 0, staging_shards = 0;
};

struct Row {
  const char* name;
  const char* tier;
  std::function<Need(double ranks)> need;
};

// Returns the table. Parameters, gradients and Adam's two moments take 4 bytes per element; if sharded, divided by N.
std::array<Row, 8> rows(const Need& flight) {
  auto fsdp = [flight](Need need) {
    need.gathered_units = flight.gathered_units;
    need.bucket_units = flight.bucket_units;
    return need;
  };
  auto offloaded = [fsdp, flight](Need need) {
    need = fsdp(need);
    need.staging_shards = flight.staging_shards;
    return need;
  };
  return {{{"DDP", "device", [](double) { return Need{16}; }},
           {"OSS", "device", [](double n) { return Need{8 + 8 / n}; }},
           {"OSS", "host", [](double n) { return Need{8, 16 / n}; }},
           {"SDP", "device", [](double n) { return Need{4 + 12 / n}; }},
           {"SDP", "host", [](double n) { return Need{4 + 4 / n, 16 / n}; }},
           {"FSDP", "device", [fsdp](double n) { return fsdp({16 / n}); }},
           {"FSDP", "host", [offloaded](double n) { return offloaded({0, 16 / n}); }},
           {"FSDP", "disk", [offloaded](double n) { return offloaded({0, 4 / n, 12 / n}); }}}};
}

struct Measured {
  MemoryReport report;  // after backward, before the gradients are cleared
  int64_t state_bytes = 0;
};

constexpr int64_t kSide = 64, kLayers = 10, kUnitNumel = kSide * kSide;

Measured run_small(std::shared_ptr<tessera::Communicator> comm, int stage, const CpuOffload& offload) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < kLayers; ++i)
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kSide, kSide).bias(false)));
  tessera::ZeroOptions options{.stage = stage};
  options.fsdp.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>();
  options.fsdp.offload = offload;
  auto zero = tessera::zero<tessera::HostAdam>(model, torch::optim::AdamOptions(1e-3), comm, options);
  for (int step = 0; step < 3; ++step) {
    zero.zero_grad();
    zero(torch::ones({2, kSide})).sum().backward();
    zero.step();
  }
  Measured measured{zero.memory()};
  for (const auto& [parameter, state] : zero.optimizer().state())
    for (const auto& [name, tensor] : tessera::read_state(*state).tensors)
      measured.state_bytes += static_cast<int64_t>(tensor.nbytes());
  return measured;
}

[[noreturn]] void mismatch(const std::string& what, int64_t got, int64_t expected) {
  std::fprintf(stderr, "largest_model: %s is %lld bytes, the layout says %lld\n", what.c_str(),
               static_cast<long long>(got), static_cast<long long>(expected));
  std::exit(1);
}

void require(const std::string& what, int64_t got, int64_t expected) {
  if (got != expected) mismatch(what, got, expected);
}

// Returns FSDP's measured units in flight on the device. Throws if another number of rows() differs from a measurement.
Need check_small() {
  constexpr int kRanks = 2;
  const auto unit = tessera::internal::FlatLayout::evenly({kUnitNumel}, kRanks, 16);
  const int64_t all = 4 * kLayers * kUnitNumel, part = 4 * kLayers * unit.shard_numel();
  const std::string folder = std::filesystem::temp_directory_path().string();
  Need flight;
  const auto body = [&](std::shared_ptr<tessera::Communicator> comm) {
    at::set_num_threads(1);
    const Measured ddp = run_small(comm, 0, {}), oss = run_small(comm, 1, {}), sdp = run_small(comm, 2, {});
    const Measured fsdp = run_small(comm, 3, {}), host = run_small(comm, 3, {.params = true, .grads = true});
    const Measured disk = run_small(comm, 3, {.params = true, .grads = true, .directory = folder});
    if (comm->rank() != 0) return;
    require("DDP's parameters and gradients", ddp.report.shard_bytes + ddp.report.grad_bytes, 2 * all);
    require("DDP's state", ddp.state_bytes, 2 * all);
    require("OSS's state", oss.state_bytes, 2 * part);
    require("SDP's parameters and gradients", sdp.report.shard_bytes + sdp.report.grad_bytes, all + part);
    require("SDP's state", sdp.state_bytes, 2 * part);
    require("FSDP on the device", fsdp.report.device_bytes + fsdp.state_bytes, 4 * part);
    require("FSDP with offload, on the device", host.report.device_bytes, 0);
    require("FSDP with offload, on the host", host.report.host_bytes + host.state_bytes, 4 * part);
    require("FSDP with a disk, on the disk", disk.report.disk_bytes, 3 * part);
    require("FSDP with a disk, gradients", disk.report.grad_bytes, part);
    flight.gathered_units = static_cast<double>(host.report.peak_gathered_bytes) / (4.0 * kUnitNumel);
    flight.bucket_units = static_cast<double>(host.report.peak_bucket_bytes) / (4.0 * kUnitNumel);
    flight.staging_shards =
        static_cast<double>(host.report.peak_staging_bytes) / (4.0 * static_cast<double>(unit.shard_numel()));
  };
  tessera::run_ranks(kRanks, body, {.peer_memory = false});  // with peer memory, less is in flight than on GPUs
  return flight;
}

int64_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) return std::atoll(line.c_str() + 8) * 1024;
  return 0;
}

// Returns the maximum growth of the process's anonymous memory during work().
double peak_mib_of(const std::function<void()>& work) {
  const int64_t before = anonymous_bytes();
  std::atomic<int64_t> peak = before;
  {
    const std::jthread sampler([&](const std::stop_token& stop) {
      for (; !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        peak = std::max(peak.load(), anonymous_bytes());
    });
    work();
  }
  return static_cast<double>(peak - before) / (1 << 20);
}

void print_memory_of_checkpoints() {
  constexpr int64_t kWidth = 1024, kCount = 48;  // each layer has 4 MiB
  const auto folder = std::filesystem::temp_directory_path() / "tessera_largest_model";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto body = [&](std::shared_ptr<tessera::Communicator> comm) {
    tessera::FsdpOptions options{.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()};
    options.offload = {.params = true, .grads = true, .directory = folder.string(), .disk_buffer_bytes = 64 << 20};
    torch::nn::Sequential model;
    for (int64_t i = 0; i < kCount; ++i)
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    tessera::FullyShardedDataParallel fsdp(model, comm, options);
    tessera::HostAdam optimizer(fsdp.parameters(), torch::optim::AdamOptions(1e-3));
    auto step = [&] {
      optimizer.zero_grad();
      fsdp(torch::ones({2, kWidth})).sum().backward();
      optimizer.step();
    };
    step();
    const double train = peak_mib_of(step);
    const double save = peak_mib_of([&] { tessera::save_checkpoint(folder / "checkpoint", fsdp, optimizer); });
    const double load = peak_mib_of([&] { tessera::load_checkpoint(folder / "checkpoint", fsdp, optimizer); });
    std::printf(
        "\nDisk tier, %lld MiB of parameters and state on the disk: host memory grows by %.0f MiB in a step, %.0f in a "
        "save, %.0f in a load.\n",
        static_cast<long long>(3 * 4 * kCount), train, save, load);
  };
  tessera::run_ranks(1, body);
  std::filesystem::remove_all(folder);
}

double room_for(double bytes, double per_parameter) { return per_parameter > 0 ? bytes / per_parameter : HUGE_VAL; }

// Returns the largest number of parameters that fit, for a model of `units` equal units.
double largest(const Need& need, double ranks, double device, double host, double disk, double units) {
  const double in_flight = 4 * (need.gathered_units + need.bucket_units + need.staging_shards / ranks) / units;
  return std::min({room_for(device, need.device_per_parameter + in_flight), room_for(host, need.host_per_parameter),
                   room_for(disk, need.disk_per_parameter)});
}

}  // namespace

int main(int argc, char** argv) {
  auto number = [&](int index, double otherwise) { return number_argument(argc, argv, index, otherwise); };
  const double ranks = number(1, 8), device = number(2, 24), host = number(3, 64), disk = number(4, 512);
  constexpr double kUnits = 64;
  const Need flight = check_small();
  std::printf("%g ranks; each has %g GiB on its device, %g on the host and %g on a disk; %g units of one size.\n",
              ranks, device, host, disk, kUnits);
  std::printf("In flight at most: %g units gathered, %g in buckets, %g shards on the link.\n\n", flight.gathered_units,
              flight.bucket_units, flight.staging_shards);
  std::printf(
      "| wrapper | tier | device, B/parameter | host | disk | largest, 1e9 parameters | parameters per device byte "
      "|\n");
  std::printf("| --- | --- | --- | --- | --- | --- | --- |\n");
  for (const Row& row : rows(flight)) {
    const Need need = row.need(ranks);
    const double in_flight = 4 * (need.gathered_units + need.bucket_units + need.staging_shards / ranks) / kUnits;
    const double most = largest(need, ranks, device * kGiB, host * kGiB, disk * kGiB, kUnits);
    std::printf("| %s | %s | %.2f | %.2f | %.2f | %.1f | %.2f |\n", row.name, row.tier,
                need.device_per_parameter + in_flight, need.host_per_parameter, need.disk_per_parameter, most * 1e-9,
                most / (device * kGiB));
  }
  print_memory_of_checkpoints();
}
