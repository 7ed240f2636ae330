#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <tessera/plan/run_record.h>

namespace tessera {

// Maps an amount of work (FLOP, bytes) to seconds. Constructed from measured points or from one speed. Linear between
// two points, and proportional below the first and above the last point.
class SpeedCurve {
 public:
  SpeedCurve() = default;  // a curve of unknown speed
  // Returns a curve of constant speed, in amounts per second. Throws std::invalid_argument unless `per_s` is above 0.
  static SpeedCurve of_speed(double per_s);
  // Makes a curve through points (amount, seconds). Throws std::invalid_argument if there are no points, or unless
  // amounts and seconds are above 0 and amounts increase.
  explicit SpeedCurve(std::vector<std::pair<double, double>> points);

  bool is_known() const { return !points_.empty(); }  // false if default-constructed
  double seconds_of(double amount) const;             // throws std::logic_error if unknown
  const std::vector<std::pair<double, double>>& points() const { return points_; }  // (amount, seconds)

 private:
  std::vector<std::pair<double, double>> points_;
};

// The time of one operator as a function of its work. Work is FLOP plus flop_per_byte * bytes, because memory bandwidth
// limits matrix products with a small dimension. For operators without FLOP, work is bytes.
struct OperatorSpeed {
  double flop_per_byte = 0;
  SpeedCurve curve{};  // maps work to seconds

  // Returns the work of an operator with these FLOP and bytes.
  double work_of(double flop, double bytes) const { return flop > 0 ? flop + flop_per_byte * bytes : bytes; }
};

// The class of an operator, which selects its speed curve: over FLOP or, for kMemory, over bytes read and written.
enum class WorkClass : uint8_t { kMatmul, kConvolution, kAttention, kMemory };
inline constexpr size_t kWorkClasses = 4;
WorkClass work_class_of(const RecordedOperator& op);  // chosen by the operator's name and FLOP
const char* name_of(WorkClass work);                  // the name in speed files: "matmul"

// The link between ranks of a group: the latency of a message, and the bytes that each rank sends per second.
// Reductions are slower, because ranks add the received numbers.
struct LinkSpeed {
  double latency_s = 0;
  double bytes_per_s = 0;          // 0: unknown
  double reduced_bytes_per_s = 0;  // speed of reductions; 0: equal to bytes_per_s

  bool operator==(const LinkSpeed&) const = default;  // compares every field
};

// The speed of one rank on one or several machines, while all other ranks do the same work.
struct MachineSpeed {
  // For each WorkClass, the curve from FLOP to seconds; for kMemory, from bytes to seconds. Without a curve,
  // convolution and attention use kMatmul's.
  std::array<SpeedCurve, kWorkClasses> work{};
  // For 16-bit operators. A class without a curve uses `work`.
  std::array<SpeedCurve, kWorkClasses> work_16bit{};
  std::map<std::string, OperatorSpeed> operators{};  // single operators in fp32, by name; preferred to `work`
  double operator_s = 0;                             // seconds that every operator takes in addition to its work
  LinkSpeed within_host{};
  LinkSpeed between_hosts{};
  int ranks_per_host = 0;  // ranks 0 to ranks_per_host - 1 are on the first host, and so on; 0: one host
  // The share of compute speed that is lost during communication, because both use the same processors. About 0 on GPUs
  // if NCCL uses few channels.
  double lost_to_communication = 0;

  // Number of cores that the ranks of a host share; a rank uses at most one at a time. Times are then processor time.
  // If there are more ranks than cores, ranks take turns (shared_cores.h). 0: cores are not shared.
  int cores = 0;
  double wake_s = 0;  // seconds from the end of a rank's wait until its sleeping thread runs
  double jitter = 0;  // standard deviation of the logarithm of one operator's times
  LinkSpeed tcp{};    // link of ranks that share no memory: wall-clock latency, bytes per second of processor time
  // true: hosts are namespaces of one machine. Not stored in speed files.
  bool shares_cores_between_hosts = false;

  double seconds_of(const RecordedOperator& op) const;  // the operator's time if no communication runs at the same time

  // Throws std::invalid_argument, which names the missing speed, unless the speeds of matrix products and of memory are
  // known. time_of() checks the speeds of links.
  void check() const;
};

// The time of a collective, and the links that it uses.
struct CollectiveTime {
  double seconds = 0;
  bool within_host = false;    // true: uses the link within hosts
  bool between_hosts = false;  // true: uses the link between hosts
};

// Throws std::invalid_argument: the time of `operation`, a collective, cannot be predicted.
[[noreturn]] void refuse_collective(const std::string& operation);

// Returns the time of a collective. In a group of n ranks, a rank sends (n - 1) / n of the full tensor for an
// all-gather, reduce-scatter, scatter or all-to-all. It sends twice that for an all-reduce, and the full tensor for a
// broadcast or reduce. The latency counts ceil(log2(n)) times, twice that for an all-reduce. With m ranks on each of h
// hosts, adds the times within hosts (m ranks) and between hosts (h ranks). Between hosts, a rank sends 1 / m of the
// bytes: m ranks send at once. Throws std::invalid_argument for an unknown operation, and for a link of unknown speed.
CollectiveTime time_of(const RecordedCollective& collective, const MachineSpeed& speed);

// Reads a speed file (JSON). Throws std::invalid_argument that names the file and the missing or wrong field.
MachineSpeed read_speed(const std::filesystem::path& file);
// Writes a speed file. Throws std::runtime_error if the file cannot be written.
void write_speed(const MachineSpeed& speed, const std::filesystem::path& file);

// Parses "400Gbit", "400Gb/s", "50GB/s", "50GB", "64GiB/s": b and bit are bits, B is bytes; "/s" is optional. A number
// without a unit is in bytes, and must be a million or more. Throws std::invalid_argument that names the text.
double bytes_per_s_of_text(const std::string& text);
// Parses "300TFLOP/s", "300TFLOPS", or a number of a million or more. Throws std::invalid_argument for any other text.
double flop_per_s_of_text(const std::string& text);
// Parses "10us", "2ms". Throws std::invalid_argument for any other text, also for a number without a unit.
double seconds_of_text(const std::string& text);

}  // namespace tessera
