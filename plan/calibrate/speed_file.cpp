#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include <tessera/plan/machine_speed.h>
#include "core/runtime/lfs_pointer.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

using nlohmann::json;

constexpr const char* kFormat = "tessera machine speed";
constexpr int kVersion = 3;
constexpr int kOldestVersion = 2;  // oldest readable version, which lacks cores, wake_s, jitter and tcp

json json_of(const std::array<SpeedCurve, kWorkClasses>& curves) {
  json all = json::object();
  for (size_t i = 0; i < kWorkClasses; ++i)
    if (curves[i].is_known()) all[name_of(static_cast<WorkClass>(i))] = curves[i].points();
  return all;
}

json json_of(const std::map<std::string, OperatorSpeed>& operators) {
  json all = json::object();
  for (const auto& [name, speed] : operators)
    all[name] = {{"flop_per_byte", speed.flop_per_byte}, {"points", speed.curve.points()}};
  return all;
}

json json_of(const LinkSpeed& link) {
  return {{"latency_s", link.latency_s},
          {"bytes_per_s", link.bytes_per_s},
          {"reduced_bytes_per_s", link.reduced_bytes_per_s}};
}

// Reads fields of a JSON object by name. expect_no_others() throws if the object has a field that was never read.
class Fields {
 public:
  Fields(const json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object.is_object()) throw std::invalid_argument((path_.empty() ? "the file" : path_) + " is no object");
  }

  const json& at(const char* name) {
    asked_.emplace_back(name);
    const auto found = object_.find(name);
    if (found == object_.end()) throw std::invalid_argument("'" + path_ + name + "' is missing");
    return *found;
  }
  double number(const char* name, double most = 1e300) {
    const json& value = at(name);
    require(value.is_number() && value.get<double>() >= 0 && value.get<double>() <= most, "'", path_, name, "' is ",
            value.dump(), ", expected a number of 0 ", most == 1 ? "to 1" : "or more");
    return value.get<double>();
  }
  void expect_no_others() const {
    for (const auto& [name, value] : object_.items())
      require(std::ranges::find(asked_, name) != asked_.end(), "'", path_, name, "' is not known");
  }

 private:
  const json& object_;
  const std::string path_;
  std::vector<std::string> asked_;
};

SpeedCurve curve_of(const json& points, const std::string& path) {
  try {
    return SpeedCurve(points.get<std::vector<std::pair<double, double>>>());
  } catch (const std::exception& error) {
    throw std::invalid_argument("'" + path + "': " + error.what());
  }
}

std::array<SpeedCurve, kWorkClasses> curves_of(const json& object, const std::string& path) {
  std::array<SpeedCurve, kWorkClasses> curves;
  Fields fields(object, path);
  for (size_t i = 0; i < kWorkClasses; ++i) {
    const char* const name = name_of(static_cast<WorkClass>(i));
    if (object.contains(name)) curves[i] = curve_of(fields.at(name), path + name);
  }
  fields.expect_no_others();
  return curves;
}

OperatorSpeed operator_of(const json& object, const std::string& path) {
  Fields fields(object, path + ".");
  OperatorSpeed speed{fields.number("flop_per_byte"), curve_of(fields.at("points"), path + ".points")};
  fields.expect_no_others();
  return speed;
}

LinkSpeed link_of(const json& object, const std::string& path) {
  Fields fields(object, path);
  LinkSpeed link{fields.number("latency_s"), fields.number("bytes_per_s"), fields.number("reduced_bytes_per_s")};
  fields.expect_no_others();
  return link;
}

MachineSpeed speed_of(const json& object) {
  Fields fields(object, "");
  if (fields.at("format") != kFormat || (fields.at("version") != kVersion && fields.at("version") != kOldestVersion))
    throw std::invalid_argument("'format' and 'version' are " + object["format"].dump() + " and " +
                                object["version"].dump() + ", expected \"" + kFormat + "\" and " +
                                std::to_string(kOldestVersion) + " or " + std::to_string(kVersion));
  MachineSpeed speed;
  speed.work = curves_of(fields.at("work"), "work.");
  speed.work_16bit = curves_of(fields.at("work_16bit"), "work_16bit.");
  const json& operators = fields.at("operators");
  if (!operators.is_object()) throw std::invalid_argument("'operators' is no object");
  for (const auto& [name, each] : operators.items())
    speed.operators.emplace(name, operator_of(each, "operators." + name));
  speed.operator_s = fields.number("operator_s");
  speed.within_host = link_of(fields.at("within_host"), "within_host.");
  speed.between_hosts = link_of(fields.at("between_hosts"), "between_hosts.");
  const auto whole = [&](const char* name) {
    const double number = fields.number(name, 1 << 20);
    require(number == std::floor(number), "'", name, "' is ", number, ", expected a whole number");
    return static_cast<int>(number);
  };
  speed.ranks_per_host = whole("ranks_per_host");
  speed.lost_to_communication = fields.number("lost_to_communication", 1);
  if (object["version"] == kVersion) {
    speed.cores = whole("cores");
    speed.wake_s = fields.number("wake_s");
    speed.jitter = fields.number("jitter", 1);
    speed.tcp = link_of(fields.at("tcp"), "tcp.");
  }
  fields.expect_no_others();
  return speed;
}

}  // namespace

MachineSpeed read_speed(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) throw std::invalid_argument("speed file " + file.string() + ": it cannot be read");
  try {
    const std::string text(std::istreambuf_iterator<char>(stream), {});
    if (const std::string problem = lfs_problem(text); !problem.empty()) throw std::invalid_argument(problem);
    return speed_of(json::parse(text));
  } catch (const std::exception& error) {
    throw std::invalid_argument("speed file " + file.string() + ": " + error.what());
  }
}

void write_speed(const MachineSpeed& speed, const std::filesystem::path& file) {
  const json all = {{"format", kFormat},
                    {"version", kVersion},
                    {"work", json_of(speed.work)},
                    {"work_16bit", json_of(speed.work_16bit)},
                    {"operators", json_of(speed.operators)},
                    {"operator_s", speed.operator_s},
                    {"within_host", json_of(speed.within_host)},
                    {"between_hosts", json_of(speed.between_hosts)},
                    {"ranks_per_host", speed.ranks_per_host},
                    {"lost_to_communication", speed.lost_to_communication},
                    {"cores", speed.cores},
                    {"wake_s", speed.wake_s},
                    {"jitter", speed.jitter},
                    {"tcp", json_of(speed.tcp)}};
  std::ofstream stream(file);
  stream << all.dump(2) << "\n";
  stream.close();
  if (!stream) throw std::runtime_error("speed file " + file.string() + ": it cannot be written");
}

}  // namespace tessera
