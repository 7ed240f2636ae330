#include "tessera/plan/calibrate.h"

#include <cstdio>
#include <filesystem>
#include <stdexcept>

#include "commands.h"

using namespace tessera;

int calibrate(const Arguments& arguments) {
  const std::filesystem::path& file = arguments.out;
  if (std::filesystem::is_directory(file))
    throw std::invalid_argument("--output " + file.string() + " is a directory, expected a file");
  CalibrationOptions options{.threads = arguments.threads, .quick = arguments.quick};
  options.progress = [](const std::string& what) { std::fprintf(stderr, "%s\n", what.c_str()); };
  const MachineSpeed speed = tessera::calibrate(options);
  write_speed(speed, file);
  const auto largest = [](const SpeedCurve& curve) {
    const auto [amount, seconds] = curve.points().back();
    return amount / seconds * 1e-9;
  };
  const auto of = [](WorkClass work) { return static_cast<size_t>(work); };
  std::printf(
      "each of %d ranks with %d threads: matrix products %.1f GFLOP/s (bfloat16 %.1f), attention %.1f, convolutions "
      "%.1f; memory %.1f GB/s; an operator %.1f us\n",
      options.ranks, options.threads, largest(speed.work[of(WorkClass::kMatmul)]),
      largest(speed.work_16bit[of(WorkClass::kMatmul)]), largest(speed.work[of(WorkClass::kAttention)]),
      largest(speed.work[of(WorkClass::kConvolution)]), largest(speed.work[of(WorkClass::kMemory)]),
      speed.operator_s * 1e6);
  std::printf("between them: %.0f us, %.2f GB/s, reduced %.2f GB/s; %.0f %% of compute lost meanwhile\nwritten to %s\n",
              speed.within_host.latency_s * 1e6, speed.within_host.bytes_per_s * 1e-9,
              speed.within_host.reduced_bytes_per_s * 1e-9, speed.lost_to_communication * 100, file.c_str());
  return 0;
}

std::optional<MachineSpeed> speed_of(const Arguments& arguments) {
  const SpeedArguments& given = arguments.speed;
  if (given == SpeedArguments{}) return std::nullopt;
  MachineSpeed speed;
  if (!given.file.empty()) speed = read_speed(given.file);
  const auto set = [](SpeedCurve& curve, const std::string& text) {
    if (!text.empty()) curve = SpeedCurve::of_speed(bytes_per_s_of_text(text));
  };
  if (!given.flops.empty()) speed.work = {}, speed.work_16bit = {};
  if (!given.flops.empty() && given.bandwidth.empty())
    throw std::invalid_argument("--flops without --memory-bandwidth: operators without FLOP would take no time");
  set(speed.work[static_cast<size_t>(WorkClass::kMatmul)], given.flops_fp32.empty() ? given.flops : given.flops_fp32);
  set(speed.work_16bit[static_cast<size_t>(WorkClass::kMatmul)], given.flops);
  set(speed.work[static_cast<size_t>(WorkClass::kMemory)], given.bandwidth);
  if (!given.operator_time.empty()) speed.operator_s = seconds_of_text(given.operator_time);
  if (arguments.ranks_per_host < 0)
    throw std::invalid_argument("--ranks-per-host is " + std::to_string(arguments.ranks_per_host) +
                                ", expected 1 or more");
  if (arguments.ranks_per_host > 0) speed.ranks_per_host = arguments.ranks_per_host;
  // Of one level there is one link.
  LinkSpeed& link = speed.ranks_per_host > 0 ? speed.between_hosts : speed.within_host;
  if (!given.link.empty()) link = {link.latency_s, bytes_per_s_of_text(given.link), 0};
  if (!given.latency.empty()) link.latency_s = seconds_of_text(given.latency);
  if (!given.host_link.empty())
    speed.within_host = {speed.within_host.latency_s, bytes_per_s_of_text(given.host_link), 0};
  if (!given.host_latency.empty()) speed.within_host.latency_s = seconds_of_text(given.host_latency);
  if (speed.ranks_per_host == 0 && (!given.host_link.empty() || !given.host_latency.empty()))
    throw std::invalid_argument("--host-link and --host-latency need --ranks-per-host: without, all ranks have --link");
  speed.check();
  return speed;
}
