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

// The seconds that an amount of work (FLOP, bytes) takes, from measured points or one speed. Linear between two points;
// proportional below the first and above the last.
class SpeedCurve {
 public:
  SpeedCurve() = default;  // unknown
  // A constant speed in amounts a second. Throws std::invalid_argument unless it is above 0.
  static SpeedCurve of_speed(double per_s);
  // Points (amount, seconds) with increasing amounts above 0; otherwise, or without points, throws
  // std::invalid_argument.
  explicit SpeedCurve(std::vector<std::pair<double, double>> points);

  bool is_known() const { return !points_.empty(); }  // false if default-constructed
  double seconds_of(double amount) const;             // throws std::logic_error if unknown
  const std::vector<std::pair<double, double>>& points() const { return points_; }  // (amount, seconds)

 private:
  std::vector<std::pair<double, double>> points_;
};

// The time of one operator by its work: FLOP plus bytes converted to FLOP, because memory limits the product of flat
// matrices. For operators without FLOP, bytes alone.
struct OperatorSpeed {
  double flop_per_byte = 0;
  SpeedCurve curve{};  // by work

  // The work of an operator with these FLOP and bytes.
  double work_of(double flop, double bytes) const { return flop > 0 ? flop + flop_per_byte * bytes : bytes; }
};

// Selects the speed of an operator. Its time depends on its FLOP; for kMemory, on the bytes that it touches.
enum class WorkClass : uint8_t { kMatmul, kConvolution, kAttention, kMemory };
inline constexpr size_t kWorkClasses = 4;
WorkClass work_class_of(const RecordedOperator& op);  // by its name and FLOP
const char* name_of(WorkClass work);                  // in speed files: "matmul"

// The link from one rank to another of its group: the latency of a message, and the bytes that each rank sends a
// second. Reductions are slower, because they add numbers on arrival.
struct LinkSpeed {
  double latency_s = 0;
  double bytes_per_s = 0;          // 0: unknown
  double reduced_bytes_per_s = 0;  // of reductions; 0: equal to bytes_per_s

  bool operator==(const LinkSpeed&) const = default;  // in every field
};

// The speed of one rank of one or several machines, while all other ranks do the same work.
struct MachineSpeed {
  // By WorkClass: FLOP to seconds; for kMemory, bytes to seconds. An unknown class uses kMatmul.
  std::array<SpeedCurve, kWorkClasses> work{};
  // For 16-bit operators. An unknown class uses `work`.
  std::array<SpeedCurve, kWorkClasses> work_16bit{};
  std::map<std::string, OperatorSpeed> operators{};  // single operators in fp32, by name; preferred to `work`
  double operator_s = 0;                             // of every operator, in addition to its work
  LinkSpeed within_host{};
  LinkSpeed between_hosts{};
  int ranks_per_host = 0;  // ranks 0 to ranks_per_host - 1 are on the first host, and so on; 0: all on one
  // The share of compute speed that communication costs, because both use the same processors. 0 on GPUs with few
  // channels.
  double lost_to_communication = 0;

  // Cores that the ranks of a host share, one for each rank at a time. Times are then processor time, and more ranks
  // than cores take turns (shared_cores.h). 0: cores are not shared.
  int cores = 0;
  double wake_s = 0;  // from the end of a wait until its sleeping thread runs
  double jitter = 0;  // standard deviation of the logarithm of one operator's times
  LinkSpeed tcp{};    // between ranks that share no memory: wall-clock latency, processor time of a sent byte
  // true: hosts are namespaces of one machine. Not stored in speed files.
  bool shares_cores_between_hosts = false;

  double seconds_of(const RecordedOperator& op) const;  // without concurrent communication

  // Throws std::invalid_argument that names missing speeds of operators. Links are checked when used.
  void check() const;
};

// The seconds of a collective, and the links that it uses.
struct CollectiveTime {
  double seconds = 0;
  bool within_host = false;    // uses that link
  bool between_hosts = false;  // uses that link
};

// Throws std::invalid_argument for a collective of unknown time.
[[noreturn]] void refuse_collective(const std::string& operation);

// Returns the time of a collective. In one level a rank sends (n - 1) / n of the full tensor for an all-gather,
// reduce-scatter, scatter or all-to-all; twice that for an all-reduce; all of it for a broadcast or reduce. The latency
// counts ceil(log2(n)) times. With m ranks on each of h hosts, adds the times within hosts (m ranks) and between hosts
// (h ranks, with 1 / m of the bytes, because m ranks send concurrently). Throws std::invalid_argument for an unknown
// operation, and for a link of unknown speed.
CollectiveTime time_of(const RecordedCollective& collective, const MachineSpeed& speed);

// Reads a JSON file. Throws std::invalid_argument that names the file and the missing or wrong field.
MachineSpeed read_speed(const std::filesystem::path& file);
// Throws std::runtime_error if the file cannot be written.
void write_speed(const MachineSpeed& speed, const std::filesystem::path& file);

// Parses "400Gbit", "400Gb/s", "50GB/s", "50GB", "64GiB/s": b and bit are bits, B is bytes; "/s" is optional. Throws
// std::invalid_argument that names the text.
double bytes_per_s_of_text(const std::string& text);
// Parses "300e12", "300TFLOP/s", "300TFLOPS". Throws std::invalid_argument.
double flop_per_s_of_text(const std::string& text);
// Parses "10us", "2ms". Throws std::invalid_argument, also without a unit.
double seconds_of_text(const std::string& text);

}  // namespace tessera
