#include "core/memory/container_limits.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>

namespace tessera::internal {
namespace {

using std::filesystem::path;

template <class Value>
std::optional<Value> first_of(const path& file) {
  std::ifstream text(file);
  Value value{};
  return text >> value ? std::optional(value) : std::nullopt;
}

// Returns a value from a file of lines "name value".
int64_t named_value(const path& file, const std::string& wanted) {
  std::ifstream text(file);
  std::string name;
  for (int64_t value = 0; text >> name >> value;)
    if (name == wanted) return value;
  return 0;
}

// Visits the folders with the limits of `controller` for this process: those of its group and of all groups above. In a
// container, the group's name may refer to the host's tree, which is not visible. The topmost visible folder is then
// the container's group. Visits none if the controller is not mounted.
void visit(const ControlGroups& groups, const std::string& controller,
           const std::function<void(const path& folder, int version)>& visitor) {
  std::istringstream lines(groups.of_process);
  for (std::string line; std::getline(lines, line);) {  // for example "4:cpu,cpuacct:/name" or "0::/name"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const int version = controllers.empty() ? 2 : 1;
    if (version == 1 && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    path mount = groups.mounted_at;
    if (version == 1) mount /= std::filesystem::is_directory(mount / controllers) ? controllers : controller;
    if (!std::filesystem::is_directory(mount)) continue;
    for (path name = path(line.substr(second + 1)).relative_path();; name = name.parent_path()) {
      visitor(mount / name, version);
      if (name.empty()) break;
    }
  }
}

}  // namespace

ControlGroups ControlGroups::of_this_process() {
  std::ifstream file("/proc/self/cgroup");
  return {std::string(std::istreambuf_iterator<char>(file), {})};
}

std::optional<double> cpu_quota(const ControlGroups& groups) {
  std::optional<double> least;
  visit(groups, "cpu", [&](const path& folder, int version) {
    double quota = 0, period = 0;
    if (version == 2) {
      std::ifstream text(folder / "cpu.max");  // "max 100000" if there is no limit
      if (!(text >> quota >> period)) return;
    } else {
      quota = first_of<double>(folder / "cpu.cfs_quota_us").value_or(-1);
      period = first_of<double>(folder / "cpu.cfs_period_us").value_or(0);
    }
    if (quota > 0 && period > 0) least = std::min(least.value_or(quota / period), quota / period);
  });
  return least;
}

std::vector<MemoryLimit> memory_limits(const ControlGroups& groups) {
  constexpr int64_t kNone = int64_t{1} << 60;  // version 1 writes a large number if there is no limit
  std::vector<MemoryLimit> limits;
  visit(groups, "memory", [&](const path& folder, int version) {
    const auto limit = first_of<int64_t>(folder / (version == 2 ? "memory.max" : "memory.limit_in_bytes"));
    if (!limit || *limit >= kNone) return;
    const char* const usage = version == 2 ? "memory.current" : "memory.usage_in_bytes";
    limits.push_back({*limit, folder / usage, folder / "memory.stat"});
  });
  return limits;
}

int64_t MemoryLimit::needed_bytes() const {
  const int64_t used_bytes = first_of<int64_t>(usage).value_or(0);
  const bool is_version_2 = usage.filename() == "memory.current";
  return used_bytes - named_value(stat, is_version_2 ? "inactive_file" : "total_inactive_file");
}

}  // namespace tessera::internal
