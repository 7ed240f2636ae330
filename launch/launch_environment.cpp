#include "tessera/launch/launch_environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <numeric>
#include <stdexcept>

namespace tessera {
namespace {

constexpr size_t kMaxHosts = 65536;
constexpr int kMaxPort = 65535;
constexpr int kMaxRanks = 1 << 20;

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument("tessera::init: " + message); }

std::optional<int64_t> to_number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// The environment, with errors that name variables.
class Variables {
 public:
  explicit Variables(const GetVariable& get) : get_(get) {}

  // Set to something. An empty value counts as not set, as `VAR= program` in a shell means it.
  bool has(const char* name) const { return text(name).has_value(); }

  std::optional<std::string> text(const char* name) const {
    const char* value = get_(name);
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  }

  std::optional<std::string> first_text(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (auto value = text(name)) return value;
    }
    return std::nullopt;
  }

  // A number in [low, high], or nothing if the variable is not set.
  std::optional<int> number(const char* name, int low, int high) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto parsed = to_number(*value);
    if (!parsed || *parsed < low || *parsed > high) {
      fail(std::string(name) + "=" + *value + ": expected a whole number from " + std::to_string(low) + " to " +
           std::to_string(high));
    }
    return static_cast<int>(*parsed);
  }

  // "RANK=1, WORLD_SIZE is not set"
  std::string describe(std::initializer_list<const char*> names) const {
    std::string all;
    for (const char* name : names) {
      if (!all.empty()) all += ", ";
      const auto value = text(name);
      all += value ? std::string(name) + "=" + *value : std::string(name) + " is not set";
    }
    return all;
  }

 private:
  const GetVariable& get_;
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

// Rank and size by one launcher; what its variables are called, for errors.
struct Group {
  const char* launcher;
  const char* rank_name;
  const char* size_name;
  int rank;
  int size;
};

std::string describe(const Group& group) {
  return std::string(group.launcher) + "'s " + group.rank_name + "=" + std::to_string(group.rank) + ", " +
         group.size_name + "=" + std::to_string(group.size);
}

// The group of a launcher with one variable for the rank and one for the size; nothing if neither
// is set.
std::optional<Group> read_group(const Variables& variables, const char* launcher, const char* rank_name,
                                const char* size_name) {
  const auto size = variables.number(size_name, 1, kMaxRanks);
  const auto rank = variables.number(rank_name, 0, kMaxRanks - 1);
  if (!rank && !size) return std::nullopt;
  if (!rank || !size) {
    fail(std::string(launcher) + "'s environment is half set: " + variables.describe({rank_name, size_name}) +
         "; expected both or neither");
  }
  if (*rank >= *size) {
    fail(variables.describe({rank_name, size_name}) + ": expected a rank below the size of the world");
  }
  return Group{launcher, rank_name, size_name, *rank, *size};
}

std::optional<Group> read_open_mpi_group(const Variables& variables) {
  auto group = read_group(variables, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  return group && group->size > 1 ? group : std::nullopt;
}

// Whether srun started this process as a task of a step. Slurm gives batch scripts SLURM_PROCID=0
// and the job's SLURM_NTASKS as well, and shells of salloc the latter, but no variable of a step;
// those two have SLURM_SUBMIT_DIR (so do tasks, which inherit it). With neither, somebody set
// srun's variables by hand, and means them.
bool in_slurm_step(const Variables& variables) {
  if (variables.first_text({"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"})) return true;
  return !variables.has("SLURM_SUBMIT_DIR") && (variables.has("SLURM_PROCID") || variables.has("SLURM_NTASKS"));
}

std::optional<Group> read_slurm_group(const Variables& variables) {
  if (!in_slurm_step(variables)) return std::nullopt;
  // SLURM_NTASKS can be the whole job's where a step is smaller, so the step's own number is first.
  const char* size_name = variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  auto group = read_group(variables, "Slurm", "SLURM_PROCID", size_name);
  return group && group->size > 1 ? group : std::nullopt;
}

// A launcher that runs once per node under another one and starts LOCAL_WORLD_SIZE ranks there has
// other numbers for good reason.
bool nested_in(const Variables& variables, const Group& inner, const Group& outer) {
  const auto local = variables.number("LOCAL_WORLD_SIZE", 1, kMaxRanks);
  return local && int64_t{outer.size} * *local == inner.size && inner.rank / *local == outer.rank;
}

void check_agreement(const Variables& variables, const Group& chosen, const std::optional<Group>& other) {
  if (!other || (chosen.rank == other->rank && chosen.size == other->size)) return;
  if (nested_in(variables, chosen, *other)) return;
  fail("two launchers contradict each other: " + describe(chosen) + ", but " + describe(*other) +
       "; unset the variables of one of them");
}

// torchrun's group. Scripts for Slurm and MPI often export one of RANK and WORLD_SIZE, for other
// programs' sake: that is no half-set environment as long as `other` says the same.
std::optional<Group> read_torchrun_group(const Variables& variables, const std::optional<Group>& other) {
  const auto rank = variables.number("RANK", 0, kMaxRanks - 1);
  const auto size = variables.number("WORLD_SIZE", 1, kMaxRanks);
  if (other && rank.has_value() != size.has_value()) {
    if (rank.value_or(other->rank) == other->rank && size.value_or(other->size) == other->size) return std::nullopt;
    fail("two launchers contradict each other: " + variables.describe({"RANK", "WORLD_SIZE"}) + ", but " +
         describe(*other) + "; unset the variables of one of them");
  }
  if (rank.has_value() != size.has_value()) {
    fail("torchrun's environment is half set: " +
         variables.describe({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) +
         "; expected all of them, or none for a world of one");
  }
  return read_group(variables, "torchrun", "RANK", "WORLD_SIZE");
}

LaunchEnvironment start_environment(const Group& group) {
  LaunchEnvironment environment;
  environment.launcher = group.launcher;
  environment.rank = group.rank;
  environment.world_size = group.size;
  environment.local_rank = group.size == 1 ? 0 : -1;
  environment.local_world_size = group.size == 1 ? 1 : 0;
  return environment;
}

// Local rank and local size by the variables of these names, where they are set. On one host they
// are the rank and the size themselves.
void read_local(const Variables& variables, const char* rank_name, const char* size_name,
                LaunchEnvironment& environment) {
  if (const auto size = variables.number(size_name, 1, environment.world_size)) environment.local_world_size = *size;
  if (const auto rank = variables.number(rank_name, 0, environment.world_size - 1)) environment.local_rank = *rank;
  if (environment.one_host() && environment.local_rank < 0) environment.local_rank = environment.rank;
  if (environment.local_world_size > 0 && environment.local_rank >= environment.local_world_size) {
    fail(variables.describe({rank_name, size_name}) + ": expected a local rank below the local size");
  }
}

LaunchEnvironment parse_torchrun(const Variables& variables, const Group& group) {
  auto environment = start_environment(group);
  environment.master_address = variables.text("MASTER_ADDR").value_or("");
  environment.master_port = variables.number("MASTER_PORT", 1, kMaxPort).value_or(0);
  if (group.size > 1 && (environment.master_address.empty() || environment.master_port == 0)) {
    fail("torchrun's environment is half set: " +
         variables.describe({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) +
         "; a world of more than one rank needs MASTER_ADDR and MASTER_PORT, where rank 0 is met");
  }
  if (is_loopback(environment.master_address) && !variables.has("LOCAL_WORLD_SIZE")) {
    environment.local_world_size = group.size;  // whoever reaches that address is on this host
  }
  read_local(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE", environment);
  environment.job = variables.text("TORCHELASTIC_RUN_ID").value_or("");
  environment.agent_serves_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  environment.restart_count = variables.number("TORCHELASTIC_RESTART_COUNT", 0, INT32_MAX).value_or(0);
  if (group.rank == 0) environment.store_listen_fd = variables.number("TESSERA_STORE_FD", 0, INT32_MAX);
  return environment;
}

// MASTER_ADDR and MASTER_PORT if set; else loopback for one host, and a port made from the job's id.
void find_master(const Variables& variables, const char* id_name, LaunchEnvironment& environment) {
  environment.master_address = variables.text("MASTER_ADDR").value_or("");
  if (environment.master_address.empty() && environment.one_host()) environment.master_address = "127.0.0.1";
  if (const auto port = variables.number("MASTER_PORT", 1, kMaxPort)) {
    environment.master_port = *port;
  } else if (!environment.job.empty()) {
    environment.master_port = derived_port(environment.job);
  } else {
    fail(environment.launcher + "'s environment is half set: " + variables.describe({id_name, "MASTER_PORT"}) +
         "; expected one of the two, for the port where rank 0 is met");
  }
}

LaunchEnvironment parse_open_mpi(const Variables& variables, const Group& group) {
  auto environment = start_environment(group);
  read_local(variables, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", environment);
  environment.job = variables.first_text({"OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"}).value_or("");
  find_master(variables, "PMIX_NAMESPACE", environment);
  if (environment.master_address.empty()) {
    fail("Open MPI's ranks are on several hosts (" +
         variables.describe({"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MASTER_ADDR"}) +
         "); expected MASTER_ADDR, the address of rank 0's host: mpirun -x MASTER_ADDR=<host> ...");
  }
  return environment;
}

// How many tasks run on this node, 0 if Slurm's variables do not say or say it of another step.
int slurm_local_size(const Variables& variables, int world_size, size_t hosts) {
  if (hosts == 1) return world_size;
  const auto counts_text = variables.first_text({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (counts_text) {
    const auto counts = expand_task_counts(*counts_text);
    const auto node = variables.number("SLURM_NODEID", 0, kMaxRanks).value_or(0);
    const bool even = std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
    const bool of_this_step = std::accumulate(counts.begin(), counts.end(), int64_t{0}) == world_size;
    if (of_this_step && (even || variables.has("SLURM_NODEID")) && static_cast<size_t>(node) < counts.size()) {
      return counts[static_cast<size_t>(node)];
    }
  }
  const auto per_node = variables.number("SLURM_NTASKS_PER_NODE", 1, kMaxRanks).value_or(0);
  const bool fits = int64_t{per_node} * static_cast<int64_t>(std::max<size_t>(hosts, 1)) == world_size;
  return fits ? per_node : 0;
}

LaunchEnvironment parse_slurm(const Variables& variables, const Group& group) {
  auto environment = start_environment(group);
  const auto list = variables.first_text({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  const auto hosts = list ? expand_host_list(*list) : std::vector<std::string>();
  environment.local_world_size = slurm_local_size(variables, group.size, hosts.size());
  if (const auto rank = variables.number("SLURM_LOCALID", 0, group.size - 1)) environment.local_rank = *rank;
  if (environment.one_host() && environment.local_rank < 0) environment.local_rank = environment.rank;

  if (const auto id = variables.first_text({"SLURM_JOB_ID", "SLURM_JOBID"})) {
    environment.job = *id + "." + variables.first_text({"SLURM_STEP_ID", "SLURM_STEPID"}).value_or("0");
  }
  find_master(variables, "SLURM_JOB_ID", environment);
  if (environment.master_address.empty() && !hosts.empty()) environment.master_address = hosts.front();
  if (environment.master_address.empty()) {
    fail("Slurm's environment is half set: " +
         variables.describe(
             {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "MASTER_ADDR"}) +
         "; expected a list of nodes or MASTER_ADDR, for the host of rank 0");
  }
  return environment;
}

// A world of one: no launcher started this process.
LaunchEnvironment parse_none(const Variables& variables) {
  LaunchEnvironment environment;
  const bool in_slurm_job = variables.has("SLURM_SUBMIT_DIR") && !in_slurm_step(variables);
  if (in_slurm_job && variables.number("SLURM_NTASKS", 1, kMaxRanks).value_or(1) > 1) {
    environment.note = "this process belongs to a Slurm job (" + variables.describe({"SLURM_JOB_ID", "SLURM_NTASKS"}) +
                       ") but srun did not start it: it is a world of one";
  }
  const bool in_launcher = in_slurm_job || variables.has("OMPI_COMM_WORLD_RANK") || variables.has("SLURM_PROCID");
  if (!in_launcher && (variables.has("MASTER_ADDR") || variables.has("MASTER_PORT"))) {
    fail("torchrun's environment is half set: " +
         variables.describe({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) +
         "; expected all of them, or none for a world of one");
  }
  return environment;
}

// A bracket group's entries: "03-05,9" -> 03 04 05 9, with the width of the first number kept.
std::vector<std::string> expand_ranges(std::string_view ranges, std::string_view list) {
  const auto malformed = [&] { fail("cannot read the list of nodes \"" + std::string(list) + "\""); };
  std::vector<std::string> entries;
  for (size_t begin = 0; begin <= ranges.size();) {
    const size_t end = std::min(ranges.find(',', begin), ranges.size());
    const auto range = ranges.substr(begin, end - begin);
    const auto dash = range.find('-');
    const auto first_text = range.substr(0, dash);
    const auto first = to_number(first_text);
    const auto last = dash == std::string_view::npos ? first : to_number(range.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last - *first >= int64_t{kMaxHosts}) malformed();
    for (int64_t number = *first; number <= *last; ++number) {
      auto digits = std::to_string(number);
      if (digits.size() < first_text.size()) digits.insert(0, first_text.size() - digits.size(), '0');
      entries.push_back(std::move(digits));
    }
    begin = end + 1;
  }
  return entries;
}

// One host expression without top-level commas, with any number of bracket groups.
std::vector<std::string> expand_host(std::string_view host, std::string_view list) {
  const auto open = host.find('[');
  if (open == std::string_view::npos) return {std::string(host)};
  const auto close = host.find(']', open);  // balanced: expand_host_list has checked
  const auto entries = expand_ranges(host.substr(open + 1, close - open - 1), list);
  const auto tails = expand_host(host.substr(close + 1), list);
  if (entries.size() * tails.size() > kMaxHosts) fail("too many nodes in \"" + std::string(list) + "\"");
  std::vector<std::string> hosts;
  for (const auto& entry : entries) {
    for (const auto& tail : tails) hosts.push_back(std::string(host.substr(0, open)).append(entry).append(tail));
  }
  return hosts;
}

}  // namespace

std::vector<std::string> expand_host_list(std::string_view list) {
  std::vector<std::string> hosts;
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i <= list.size(); ++i) {
    const char c = i < list.size() ? list[i] : ',';
    if (c == '[') ++depth;
    if (c == ']') --depth;
    const bool ends = c == ',' && (depth == 0 || i == list.size());
    if (depth < 0 || depth > 1 || (ends && (depth != 0 || i == begin))) {
      fail("cannot read the list of nodes \"" + std::string(list) + "\"");
    }
    if (!ends) continue;
    auto expanded = expand_host(list.substr(begin, i - begin), list);
    hosts.insert(hosts.end(), std::make_move_iterator(expanded.begin()), std::make_move_iterator(expanded.end()));
    if (hosts.size() > kMaxHosts) fail("too many nodes in \"" + std::string(list) + "\"");
    begin = i + 1;
  }
  return hosts;
}

std::vector<int> expand_task_counts(std::string_view counts) {
  const auto malformed = [&] { fail("cannot read the tasks per node \"" + std::string(counts) + "\", as in 4(x2),3"); };
  std::vector<int> expanded;
  for (size_t begin = 0; begin <= counts.size();) {
    const size_t end = std::min(counts.find(',', begin), counts.size());
    const auto entry = counts.substr(begin, end - begin);
    const auto open = entry.find("(x");
    const auto tasks = to_number(entry.substr(0, open));
    std::optional<int64_t> nodes = 1;
    if (open != std::string_view::npos) {
      if (!entry.ends_with(')')) malformed();
      nodes = to_number(entry.substr(open + 2, entry.size() - open - 3));
    }
    if (!tasks || !nodes || *tasks < 0 || *tasks > kMaxRanks || *nodes < 1 || *nodes > int64_t{kMaxHosts}) malformed();
    expanded.insert(expanded.end(), static_cast<size_t>(*nodes), static_cast<int>(*tasks));
    begin = end + 1;
  }
  return expanded;
}

int derived_port(std::string_view text) noexcept {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a: the same on every host and in every build
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return 15000 + static_cast<int>((hash ^ (hash >> 32)) % 16000);
}

LaunchEnvironment parse_launch_environment(const GetVariable& get) {
  const Variables variables(get);
  // What torchrun itself started has nothing to do with the launcher that torchrun runs under.
  const bool by_torchrun = variables.has("TORCHELASTIC_RUN_ID");
  const auto open_mpi = by_torchrun ? std::nullopt : read_open_mpi_group(variables);
  // Under mpirun, Slurm's variables are those of the daemon that mpirun started with srun.
  const auto slurm = by_torchrun || open_mpi ? std::nullopt : read_slurm_group(variables);
  const auto& other = open_mpi ? open_mpi : slurm;
  if (const auto torchrun = read_torchrun_group(variables, other)) {
    check_agreement(variables, *torchrun, other);
    return parse_torchrun(variables, *torchrun);
  }
  if (open_mpi) return parse_open_mpi(variables, *open_mpi);
  if (slurm) return parse_slurm(variables, *slurm);
  return parse_none(variables);
}

}  // namespace tessera
