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

// Seconds that amounts of some work take (FLOP, bytes), as measured or as one speed. Between two points in a straight
// line, below the first and above the last in proportion to these.
class SpeedCurve {
 public:
  SpeedCurve() = default;  // not known
  // One speed, amount a second. Throws std::invalid_argument unless it is above 0.
  static SpeedCurve of_speed(double per_s);
  // (amount, seconds) with growing amounts above 0. Throws std::invalid_argument for others, and for none.
  explicit SpeedCurve(std::vector<std::pair<double, double>> points);

  bool is_known() const { return !points_.empty(); }  // false of one that was made by default
  double seconds_of(double amount) const;             // throws std::logic_error if it is not known
  const std::vector<std::pair<double, double>>& points() const { return points_; }  // (amount, seconds)

 private:
  std::vector<std::pair<double, double>> points_;
};

// Seconds of one operator by its work: FLOP and, since a product of flat matrices waits for memory, the bytes that it
// touches, each as if it were so many FLOP. Of operators without FLOP bytes alone.
struct OperatorSpeed {
  double flop_per_byte = 0;
  SpeedCurve curve;  // of work

  // Where `curve` is to be read for an operator of that many FLOP and bytes.
  double work_of(double flop, double bytes) const { return flop > 0 ? flop + flop_per_byte * bytes : bytes; }
};

// What an operator's time depends on: FLOP of its class or, with none, the bytes that it touches.
enum class WorkClass : uint8_t { kMatmul, kConvolution, kAttention, kMemory };
inline constexpr size_t kWorkClasses = 4;
WorkClass work_class_of(const RecordedOperator& op);  // by its name and FLOP
const char* name_of(WorkClass work);                  // as speed files have it: "matmul"

// From one rank to another of its group: what a message takes at least, and what each rank sends in a second. Where
// numbers are added on arrival they come slower.
struct LinkSpeed {
  double latency_s = 0;
  double bytes_per_s = 0;          // 0: not known
  double reduced_bytes_per_s = 0;  // of what is reduced on the way; 0: as fast

  bool operator==(const LinkSpeed&) const = default;  // in every field
};

// What one rank of a machine, or of several, computes and sends in a second while all others do the same.
struct MachineSpeed {
  // By WorkClass: FLOP to seconds; of kMemory bytes to seconds. A class that is not known goes as matrix products do.
  std::array<SpeedCurve, kWorkClasses> work;
  // The same of 16-bit operators. What is not known is as `work`.
  std::array<SpeedCurve, kWorkClasses> work_16bit;
  std::map<std::string, OperatorSpeed> operators;  // of single ones in fp32, by name; before `work`
  double operator_s = 0;                           // of every operator, beside its work
  LinkSpeed within_host;
  LinkSpeed between_hosts;
  int ranks_per_host = 0;  // ranks 0 to ranks_per_host - 1 are on the first, and so on; 0: all on one
  // Of compute's speed while something is communicated, since the same processors do both. 0 on GPUs with few channels.
  double lost_to_communication = 0;

  // Cores that the ranks of a host share, each rank one at a time: times above are then processor time, and more ranks
  // than cores take turns (shared_cores.h). 0: each rank has what it needs.
  int cores = 0;
  double wake_s = 0;  // until a thread that sleeps goes on, once what it waits for is there
  double jitter = 0;  // of one operator's times, the standard deviation of their logarithm
  LinkSpeed tcp;      // between ranks that share no memory: latency by the clock, processor seconds a byte that is sent
  // Hosts are namespaces of one machine. Not in speed files.
  bool shares_cores_between_hosts = false;

  double seconds_of(const RecordedOperator& op) const;  // alone, with nothing communicated meanwhile

  // Throws std::invalid_argument that names what is missing for operators. Links are missed when they are used.
  void check() const;
};

// How a group lies on hosts, and a collective's seconds there.
struct CollectiveTime {
  double seconds = 0;
  bool within_host = false;    // uses that link
  bool between_hosts = false;  // that too, or alone
};

// Throws std::invalid_argument for a collective whose time is not known.
[[noreturn]] void refuse_collective(const std::string& operation);

// In one level a rank sends (n - 1) / n of the full tensor for an all-gather, a reduce-scatter, a scatter or an
// all-to-all, twice that for an all-reduce (as both one after the other), all of it for a broadcast or a reduce; and
// waits ceil(log2(n)) times for the latency. With m ranks of the group on each of h hosts: the same within hosts (m
// ranks), and between hosts (h ranks) with 1 / m of the bytes for each of the m ranks, who send at the same time; the
// phases one after the other. Throws std::invalid_argument for an operation that it does not know, and for a link whose
// speed is not known.
CollectiveTime time_of(const RecordedCollective& collective, const MachineSpeed& speed);

// A JSON file. Throws std::invalid_argument, naming the file and the field that is missing or wrong.
MachineSpeed read_speed(const std::filesystem::path& file);
// Throws std::runtime_error where the file cannot be written.
void write_speed(const MachineSpeed& speed, const std::filesystem::path& file);

// "400Gbit", "400Gb/s", "50GB/s", "50GB", "64GiB/s": b and bit are bits, B bytes, a second with and without "/s".
// Throws std::invalid_argument that names the text.
double bytes_per_s_of_text(const std::string& text);
// "300e12", "300TFLOP/s", "300TFLOPS". Throws likewise.
double flop_per_s_of_text(const std::string& text);
// "10us", "2ms". Throws likewise.
double seconds_of_text(const std::string& text);

}  // namespace tessera
