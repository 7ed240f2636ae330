#include <tessera/plan/machine_speed.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <string_view>

#include "core/runtime/require.h"
#include "plan/report/quantity_text.h"

namespace tessera {
using namespace internal;

void refuse_collective(const std::string& operation) {
  throw std::invalid_argument("the time of a collective '" + operation +
                              "', expected all-gather, reduce-scatter, all-reduce, broadcast, reduce, scatter or "
                              "all-to-all");
}

namespace {

bool is_16bit(c10::ScalarType dtype) { return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16; }

// The distribution of a group over hosts: the number of hosts, and the largest number of ranks on one host.
struct Layout {
  int hosts = 1;
  int ranks_each = 1;
};
Layout layout_of(const RecordedCollective& collective, int ranks_per_host) {
  if (ranks_per_host == 0) return {1, collective.ranks};
  if (!collective.members) {
    const int hosts = (collective.ranks + ranks_per_host - 1) / ranks_per_host;
    return {hosts, std::min(collective.ranks, ranks_per_host)};
  }
  std::map<int, int> ranks_of_host;
  for (const int member : *collective.members) ++ranks_of_host[member / ranks_per_host];
  Layout layout{static_cast<int>(ranks_of_host.size()), 1};
  for (const auto& [host, ranks] : ranks_of_host) layout.ranks_each = std::max(layout.ranks_each, ranks);
  return layout;
}

double level_seconds(const std::string& operation, int ranks, double bytes, const LinkSpeed& link) {
  if (ranks < 2) return 0;
  const double latency_s = link.latency_s * std::bit_width(static_cast<unsigned>(ranks - 1));
  const double part = bytes * (ranks - 1) / ranks;
  const double reduced = link.reduced_bytes_per_s > 0 ? link.reduced_bytes_per_s : link.bytes_per_s;
  if (operation == "all-gather" || operation == "scatter" || operation == "all-to-all")
    return latency_s + part / link.bytes_per_s;
  if (operation == "reduce-scatter") return latency_s + part / reduced;
  if (operation == "all-reduce") return 2 * latency_s + part / reduced + part / link.bytes_per_s;
  if (operation == "broadcast") return latency_s + bytes / link.bytes_per_s;
  if (operation == "reduce") return latency_s + bytes / reduced;
  refuse_collective(operation);
}

using Units = std::map<std::string_view, double>;
double speed_of_text(const std::string& text, const Units& units, const char* expected) {
  const auto per_s = quantity_of_text(text, units, /*is_speed=*/true);
  require(per_s.has_value(), "'", text, "', expected ", expected);
  require(*per_s > 0, "'", text, "' a second, expected more than 0");
  return *per_s;
}

}  // namespace

SpeedCurve SpeedCurve::of_speed(double per_s) {
  require(per_s > 0 && std::isfinite(per_s), "a speed of ", per_s, " a second, expected one above 0");
  return SpeedCurve({{per_s, 1.0}});
}

SpeedCurve::SpeedCurve(std::vector<std::pair<double, double>> points) : points_(std::move(points)) {
  if (points_.empty()) throw std::invalid_argument("a curve of no points, expected one or more");
  double before = 0;
  for (const auto& [amount, seconds] : points_) {
    require(amount > before && seconds > 0 && std::isfinite(amount) && std::isfinite(seconds), "a curve with ", amount,
            " in ", seconds, " s, expected growing amounts and seconds above 0");
    before = amount;
  }
}

double SpeedCurve::seconds_of(double amount) const {
  if (points_.empty()) throw std::logic_error("seconds of a speed that is not known");
  const auto above = std::ranges::lower_bound(points_, amount, {}, &std::pair<double, double>::first);
  if (above == points_.begin()) return above->second * amount / above->first;
  const auto below = std::prev(above);
  if (above == points_.end()) return below->second * amount / below->first;
  const double share = (amount - below->first) / (above->first - below->first);
  return below->second + share * (above->second - below->second);
}

WorkClass work_class_of(const RecordedOperator& op) {
  if (op.flop == 0) return WorkClass::kMemory;
  if (op.name.find("attention") != std::string::npos) return WorkClass::kAttention;
  return op.name.find("conv") != std::string::npos ? WorkClass::kConvolution : WorkClass::kMatmul;
}

const char* name_of(WorkClass work) {
  static constexpr std::array<const char*, kWorkClasses> kNames = {"matmul", "convolution", "attention", "memory"};
  return kNames[static_cast<size_t>(work)];
}

double MachineSpeed::seconds_of(const RecordedOperator& op) const {
  const WorkClass work_class = work_class_of(op);
  const auto named = is_16bit(op.dtype) ? operators.end() : operators.find(op.name);
  if (named != operators.end()) {
    const double amount = named->second.work_of(static_cast<double>(op.flop), static_cast<double>(op.bytes));
    return operator_s + (amount > 0 ? named->second.curve.seconds_of(amount) : 0);
  }
  const auto curve_of = [&](WorkClass which) -> const SpeedCurve& {
    const auto index = static_cast<size_t>(which);
    return is_16bit(op.dtype) && work_16bit[index].is_known() ? work_16bit[index] : work[index];
  };
  const double memory_s = op.bytes == 0 ? 0 : curve_of(WorkClass::kMemory).seconds_of(static_cast<double>(op.bytes));
  if (work_class == WorkClass::kMemory) return operator_s + memory_s;
  const SpeedCurve& own = curve_of(work_class);
  const SpeedCurve& curve = own.is_known() ? own : curve_of(WorkClass::kMatmul);
  // Uses the larger time, because reading the operands may take longer than computing a product of flat matrices.
  return operator_s + std::max(curve.seconds_of(static_cast<double>(op.flop)), memory_s);
}

void MachineSpeed::check() const {
  require(work[static_cast<size_t>(WorkClass::kMatmul)].is_known(),
          "the machine's speed lacks FLOP a second of matrix products");
  require(work[static_cast<size_t>(WorkClass::kMemory)].is_known(),
          "the machine's speed lacks the bandwidth of memory");
}

CollectiveTime time_of(const RecordedCollective& collective, const MachineSpeed& speed) {
  const Layout layout = layout_of(collective, speed.ranks_per_host);
  const auto bytes = static_cast<double>(collective.bytes);
  if (layout.ranks_each > 1 && !(speed.within_host.bytes_per_s > 0))
    throw std::invalid_argument("the machine's speed lacks bytes a second between ranks of a host");
  if (layout.hosts > 1 && !(speed.between_hosts.bytes_per_s > 0))
    throw std::invalid_argument("the machine's speed lacks bytes a second between hosts");
  CollectiveTime time{0, layout.ranks_each > 1, layout.hosts > 1};
  if (time.within_host)
    time.seconds += level_seconds(collective.operation, layout.ranks_each, bytes, speed.within_host);
  if (time.between_hosts)
    time.seconds += level_seconds(collective.operation, layout.hosts, bytes / layout.ranks_each, speed.between_hosts);
  return time;
}

double bytes_per_s_of_text(const std::string& text) {
  static const Units units = {{"", 1},           {"B", 1},          {"KB", 1e3},        {"MB", 1e6},
                              {"GB", 1e9},       {"TB", 1e12},      {"KiB", 0x1p10},    {"MiB", 0x1p20},
                              {"GiB", 0x1p30},   {"TiB", 0x1p40},   {"bit", 1. / 8},    {"Kbit", 1e3 / 8},
                              {"Mbit", 1e6 / 8}, {"Gbit", 1e9 / 8}, {"Tbit", 1e12 / 8}, {"b", 1. / 8},
                              {"Kb", 1e3 / 8},   {"Mb", 1e6 / 8},   {"Gb", 1e9 / 8},    {"Tb", 1e12 / 8}};
  return speed_of_text(text, units, "bytes or bits a second with a unit, as 50GB/s, 400Gb/s or 400Gbit");
}

double flop_per_s_of_text(const std::string& text) {
  static const Units units = {{"", 1}, {"FLOP", 1}, {"MFLOP", 1e6}, {"GFLOP", 1e9}, {"TFLOP", 1e12}, {"PFLOP", 1e15}};
  const bool is_plural = text.ends_with("FLOPS");
  const std::string singular = is_plural ? text.substr(0, text.size() - 1) : text;
  return speed_of_text(singular, units, "FLOP a second with a unit, as 300TFLOP/s");
}

double seconds_of_text(const std::string& text) {
  static const Units units = {{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}};
  const auto seconds = quantity_of_text(text, units);
  require(seconds.has_value(), "'", text, "', expected a time with a unit, as 10us");
  return *seconds;
}

}  // namespace tessera
