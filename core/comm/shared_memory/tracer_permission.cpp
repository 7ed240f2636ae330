#include "core/comm/shared_memory/tracer_permission.h"

#include <c10/util/StringUtil.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>

#include "core/runtime/guarded_by.h"

namespace tessera::internal {
namespace {

std::mutex permitted_mutex;  // guards permitted() and the process's permission in the kernel
std::vector<pid_t>& permitted() {
  static auto* const pids = new std::vector<pid_t>;
  return *pids;
}
long last_told TESSERA_GUARDED_BY(permitted_mutex) = 0;

// Returns the parent of a process, or 0 if it has none or is not visible. Searches for the last bracket, because the
// process's name, in brackets, may contain any characters.
pid_t parent_of(pid_t pid) {
  std::ifstream file(c10::str("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  const auto end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) return 0;
  std::istringstream rest(text.substr(end_of_name + 1));
  std::string state;
  pid_t parent = 0;
  return rest >> state >> parent ? parent : 0;
}

void tell_kernel() {
  const auto& pids = permitted();
  if (pids.empty()) {
    last_told = 0;
  } else if (std::ranges::find(pids, 0) != pids.end()) {
    last_told = -1;
  } else {
    const auto own = lineage();
    const auto height = [&](pid_t pid) { return std::ranges::find(own, pid) - own.begin(); };
    last_told = *std::ranges::max_element(pids, [&](pid_t a, pid_t b) { return height(a) < height(b); });
  }
  const auto tracer = static_cast<unsigned long>(last_told);
  ::prctl(PR_SET_PTRACER, last_told == -1 ? PR_SET_PTRACER_ANY : tracer, 0, 0, 0);  // without Yama, fails with EINVAL
}

}  // namespace

TracerPermission::TracerPermission(pid_t ancestor) : ancestor_(ancestor) {
  std::lock_guard lock(permitted_mutex);
  permitted().push_back(ancestor_);
  tell_kernel();
}

TracerPermission::~TracerPermission() {
  std::lock_guard lock(permitted_mutex);
  auto& pids = permitted();
  pids.erase(std::ranges::find(pids, ancestor_));
  tell_kernel();
}

long TracerPermission::told() {
  std::lock_guard lock(permitted_mutex);
  return last_told;
}

std::vector<pid_t> lineage() {
  std::vector<pid_t> pids;
  for (pid_t pid = ::getpid(); pid > 0; pid = parent_of(pid)) pids.push_back(pid);
  return pids;
}

pid_t common_ancestor(const std::vector<std::vector<pid_t>>& lineages) {
  if (lineages.empty()) return 0;
  for (const pid_t pid : lineages[0])
    if (std::ranges::all_of(lineages, [&](const auto& other) { return std::ranges::find(other, pid) != other.end(); }))
      return pid;
  return 0;
}

}  // namespace tessera::internal
