#include "plan/calibrate/calibrate.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include <tessera/launch.h>
#include "commands.h"
#include "gpu_cards.h"
#include "plan/report/quantity_text.h"

using namespace tessera;
using namespace tessera::internal;

namespace {

// Throws unless `file` can be written. Called before the measurements, which take a minute.
void require_writable(const std::filesystem::path& file) {
  const auto written = std::filesystem::exists(file) ? file : std::filesystem::absolute(file).parent_path();
  if (::access(written.c_str(), W_OK) != 0)
    throw std::invalid_argument("--output " + file.string() + " cannot be written: " + std::strerror(errno));
}

// Runs as one rank of a launcher's group, alone on its host.
int calibrate_between_hosts(const Arguments& arguments, const CalibrationOptions& options) {
  if (!launched())
    throw std::invalid_argument(
        "--speed adds the link between hosts to a machine's speed, as a launcher's group of one rank a host: expected "
        "torchrun's, Open MPI's or Slurm's environment");
  if (arguments.ranks)
    throw std::invalid_argument("--ranks is for one host: with --speed the launcher gives the number of ranks");
  const char* on_host = std::getenv("LOCAL_WORLD_SIZE");
  if (on_host && std::string(on_host) != "1")
    throw std::invalid_argument(std::string("LOCAL_WORLD_SIZE is ") + on_host + ", expected one rank on each host");
  const auto comm = init();
  MachineSpeed speed;
  if (comm->rank() == 0) {
    require_writable(arguments.out);
    speed = read_speed(arguments.speed.file);
  }
  speed = calibrate_hosts(std::move(speed), comm, options);
  if (comm->rank() != 0) return 0;
  write_speed(speed, arguments.out);
  std::printf(
      "between %d hosts: %.0f us, %.3f GB/s, of which a core sends %.2f GB/s, or %.2f where numbers are added\n"
      "written to %s\n",
      comm->size(), (speed.between_hosts.latency_s + speed.tcp.latency_s) * 1e6, speed.between_hosts.bytes_per_s * 1e-9,
      speed.tcp.bytes_per_s * 1e-9, speed.tcp.reduced_bytes_per_s * 1e-9, arguments.out.c_str());
  return 0;
}

}  // namespace

int calibrate(const Arguments& arguments) {
  const std::filesystem::path& file = arguments.out;
  constexpr int kMostThreadsOfACore = 4;  // with more threads, times are mostly those of the scheduler
  const int most = kMostThreadsOfACore * available_cores();
  const int ranks = arguments.ranks.value_or(2);
  require_range("ranks", ranks, 1, most);
  require_range("threads", arguments.threads, 1, most / ranks);
  if (std::filesystem::is_directory(file))
    throw std::invalid_argument("--output " + file.string() + " is a directory, expected a file");
  CalibrationOptions options{.ranks = ranks, .threads = arguments.threads, .quick = arguments.quick};
  options.progress = [](const std::string& what) { std::fprintf(stderr, "%s\n", what.c_str()); };
  if (!arguments.speed.file.empty()) return calibrate_between_hosts(arguments, options);
  require_writable(file);
  const MachineSpeed speed = calibrate(options);
  write_speed(speed, file);
  const auto largest = [](const SpeedCurve& curve) {
    const auto [amount, seconds] = curve.points().back();
    return amount / seconds * 1e-9;
  };
  const auto of = [](WorkClass work) { return static_cast<size_t>(work); };
  std::printf(
      "%s with %s: matrix products %.1f GFLOP/s (bfloat16 %.1f), attention %.1f, convolutions "
      "%.1f; memory %.1f GB/s; an operator %.1f us\n",
      ((options.ranks == 1 ? "" : "each of ") + counted(options.ranks, "rank")).c_str(),
      counted(options.threads, "thread").c_str(), largest(speed.work[of(WorkClass::kMatmul)]),
      largest(speed.work_16bit[of(WorkClass::kMatmul)]), largest(speed.work[of(WorkClass::kAttention)]),
      largest(speed.work[of(WorkClass::kConvolution)]), largest(speed.work[of(WorkClass::kMemory)]),
      speed.operator_s * 1e6);
  if (options.ranks > 1)
    std::printf(
        "between them: %.0f us, %.2f GB/s, reduced %.2f GB/s; by TCP %.0f us, %.2f GB/s; %.0f %% of compute lost "
        "meanwhile\n",
        speed.within_host.latency_s * 1e6, speed.within_host.bytes_per_s * 1e-9,
        speed.within_host.reduced_bytes_per_s * 1e-9, speed.tcp.latency_s * 1e6, speed.tcp.bytes_per_s * 1e-9,
        speed.lost_to_communication * 100);
  std::printf("written to %s\n", file.c_str());
  return 0;
}

namespace {

// Replaces the speeds of links by those of the options. On one host, --link is the link within it. With several hosts,
// --link is the link between hosts, and also within a host if neither the speed file nor --host-link gives that speed.
void set_links(MachineSpeed& speed, const SpeedArguments& given, const Machines& machines) {
  const auto set = [](LinkSpeed& link, const std::string& host, const std::string& bytes, const std::string& latency) {
    if (!bytes.empty()) link = {link.latency_s, parse_option(host + "link", bytes, bytes_per_s_of_text), 0};
    if (!latency.empty()) link.latency_s = parse_option(host + "latency", latency, seconds_of_text);
  };
  const bool is_one_host = machines.ranks <= machines.ranks_per_host;
  if (is_one_host &&
      ((!given.link.empty() && !given.host_link.empty()) || (!given.latency.empty() && !given.host_latency.empty())))
    throw std::invalid_argument("--link and --host-link, or their latencies, but all " +
                                std::to_string(machines.ranks) + " ranks are on one host of " +
                                std::to_string(machines.ranks_per_host) +
                                ", which has one link; --ranks-per-host says how many are");
  if (is_one_host || !(speed.within_host.bytes_per_s > 0)) set(speed.within_host, "", given.link, given.latency);
  set(speed.within_host, "host-", given.host_link, given.host_latency);
  if (!is_one_host) set(speed.between_hosts, "", given.link, given.latency);
}

std::string missing_in(const MachineSpeed& speed, const Machines& machines) {
  if (!speed.work[static_cast<size_t>(WorkClass::kMatmul)].is_known()) return "FLOP a second (--flops)";
  if (!speed.work[static_cast<size_t>(WorkClass::kMemory)].is_known())
    return "the bandwidth of memory (--memory-bandwidth)";
  const int on_a_host = std::min(machines.ranks, machines.ranks_per_host);
  if (on_a_host > 1 && !(speed.within_host.bytes_per_s > 0))
    return "bytes a second between ranks of a host (--link, or --host-link)";
  if (machines.ranks > on_a_host && !(speed.between_hosts.bytes_per_s > 0))
    return "bytes a second between hosts (--link)";
  return "";
}

}  // namespace

KnownSpeed speed_of(const Arguments& arguments, Machines& machines) {
  const SpeedArguments& given = arguments.speed;
  if (!given.file.empty() && !given.gpu.empty()) throw std::invalid_argument("--speed and --gpu, expected one of them");
  MachineSpeed speed;
  if (!given.file.empty()) speed = read_speed(given.file);
  if (!given.gpu.empty()) speed = gpu_card(given.gpu).speed();
  constexpr int kUsualRanksPerHost = 8;
  machines.ranks_per_host =
      arguments.ranks_per_host.value_or(speed.ranks_per_host > 0 ? speed.ranks_per_host : kUsualRanksPerHost);
  require_range("ranks-per-host", machines.ranks_per_host, 1, std::numeric_limits<int>::max());
  if (given == SpeedArguments{}) return {};
  const auto set = [](SpeedCurve& curve, const char* option, const std::string& text, auto per_s_of) {
    if (!text.empty()) curve = SpeedCurve::of_speed(parse_option(option, text, per_s_of));
  };
  if (!given.flops.empty()) {
    const SpeedCurve memory = given.gpu.empty() ? SpeedCurve() : speed.work[static_cast<size_t>(WorkClass::kMemory)];
    speed.work = {}, speed.work_16bit = {}, speed.cores = 0;
    speed.work[static_cast<size_t>(WorkClass::kMemory)] = memory;
  }
  // Removes the speeds of single operators, which would override the given values.
  if (!given.flops.empty() || !given.flops_fp32.empty() || !given.bandwidth.empty()) speed.operators.clear();
  if (!given.flops.empty() && given.bandwidth.empty() && given.gpu.empty())
    throw std::invalid_argument("--flops without --memory-bandwidth: operators without FLOP would take no time");
  for (auto* work : {&speed.work, &speed.work_16bit})
    set((*work)[static_cast<size_t>(WorkClass::kMatmul)], "flops", given.flops, flop_per_s_of_text);
  set(speed.work[static_cast<size_t>(WorkClass::kMatmul)], "flops-fp32", given.flops_fp32, flop_per_s_of_text);
  set(speed.work[static_cast<size_t>(WorkClass::kMemory)], "memory-bandwidth", given.bandwidth, bytes_per_s_of_text);
  if (!given.operator_time.empty())
    speed.operator_s = parse_option("operator-time", given.operator_time, seconds_of_text);
  set_links(speed, given, machines);
  if (std::string missing = missing_in(speed, machines); !missing.empty()) return {std::nullopt, std::move(missing)};
  return {speed, ""};
}
