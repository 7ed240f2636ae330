#include "core/launch/launch_environment.h"

#include <c10/util/StringUtil.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <stdexcept>

#include "core/comm/fingerprint.h"
#include "core/launch/local_address.h"

namespace tessera::internal {
namespace {

constexpr size_t kMaxHosts = 65536;
constexpr int kMaxPort = 65535;
constexpr int kMaxRanks = 1 << 20;
constexpr const char* kAgentStore = "TORCHELASTIC_USE_AGENT_STORE";

template <class... Parts>
[[noreturn]] void fail(const Parts&... message) {
  throw std::invalid_argument(c10::str("tessera::init: ", message...));
}

std::optional<int64_t> to_number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

using NameList = std::initializer_list<const char*>;

// Reads environment variables. Its errors name the variables.
class Variables {
 public:
  explicit Variables(const GetVariable& get) : get_(get) {}

  // Returns whether a variable has a value. An empty value counts as unset (`VAR= program` in a shell).
  bool has(const char* name) const { return text(name).has_value(); }

  std::optional<std::string> text(const char* name) const {
    const char* value = get_(name);
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  }

  std::optional<std::string> first_text(NameList names) const {
    for (const char* name : names)
      if (auto value = text(name)) return value;
    return std::nullopt;
  }

  // Returns the variable's number; nullopt if it is not set. Throws std::invalid_argument if it is not in [low, high].
  std::optional<int> number(const char* name, int low, int high) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto parsed = to_number(*value);
    if (!parsed || *parsed < low || *parsed > high)
      fail(name, "=", *value, ": expected a whole number from ", low, " to ", high);
    return static_cast<int>(*parsed);
  }

  // Returns for example "RANK=1, WORLD_SIZE is not set".
  std::string describe(NameList names) const {
    std::vector<std::string> all;
    for (const char* name : names)
      all.push_back(has(name) ? c10::str(name, "=", *text(name)) : c10::str(name, " is not set"));
    return c10::Join(", ", all);
  }

  [[noreturn]] void fail_half_set(std::string_view launcher, NameList names, std::string_view expected) const {
    fail(launcher, "'s environment is half set: ", describe(names), "; expected ", expected);
  }

  [[noreturn]] void fail_half_set_torchrun(std::string_view expected) const {
    fail("the environment is half set: ", describe({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}), "; expected ",
         expected);
  }

 private:
  const GetVariable& get_;
};

// The rank and the size that a launcher sets, with the names of the launcher's variables for error texts.
struct Group {
  const char* launcher;
  const char* rank_name;
  const char* size_name;
  int rank;
  int size;

  bool operator==(const Group& other) const noexcept { return rank == other.rank && size == other.size; }
};

// Returns the group of a launcher that has one variable for the rank and one for the size; nullopt if neither is set.
std::optional<Group> read_group(const Variables& variables, const char* launcher, const char* rank_name,
                                const char* size_name) {
  const auto size = variables.number(size_name, 1, kMaxRanks);
  const auto rank = variables.number(rank_name, 0, kMaxRanks - 1);
  if (!rank && !size) return std::nullopt;
  if (!rank || !size) variables.fail_half_set(launcher, {rank_name, size_name}, "both or neither");
  if (*rank >= *size) fail(variables.describe({rank_name, size_name}), ": expected a rank below the size of the world");
  return Group{launcher, rank_name, size_name, *rank, *size};
}

// A launcher of MPI programs and the names of its variables. A name is null if the launcher does not set that variable.
struct MpiLauncher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* id;  // id of the job, equal on all ranks
  const char* export_option;
};

constexpr const char* kPmiSize = "PMI_SIZE";
constexpr const char* kPmixId = "PMIX_NAMESPACE";

// Launchers, innermost first. All but the last two have variables of their own, and may also set those of PMI and PMIx.
constexpr MpiLauncher kMpiLaunchers[] = {
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", kPmixId, "mpirun -x MASTER_ADDR=<host> ..."},
    {"MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
     "MPIRUN_ID", "mpirun_rsh ... MASTER_ADDR=<host> ..."},
    {"JSM", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", kPmixId,
     "jsrun -E MASTER_ADDR=<host> ..."},
    {"Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", nullptr, "FLUX_JOB_ID",
     "flux run --env=MASTER_ADDR=<host> ..."},
    {"Cray PALS", "PALS_RANKID", kPmiSize, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID",
     "mpiexec --env MASTER_ADDR=<host> ..."},
    {"MPICH or Intel MPI", "PMI_RANK", kPmiSize, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr,
     "mpiexec -genv MASTER_ADDR <host> ..."},
    {"PMIx", "PMIX_RANK", nullptr, nullptr, nullptr, kPmixId, "prun -x MASTER_ADDR=<host> ..."},
};
constexpr const MpiLauncher& kOpenMpi = kMpiLaunchers[0];

// Returns the group of a launcher; nullopt if neither its rank nor its size is set. If only the rank is set, takes the
// size from WORLD_SIZE, or returns nullopt if RANK is set as well. Also returns nullopt if only one is set and the
// enclosing launcher `outer`, such as srun, may have set it.
std::optional<Group> read_mpi_group(const Variables& variables, const MpiLauncher& launcher,
                                    const std::optional<Group>& outer) {
  const bool gives_size = launcher.size != nullptr && variables.has(launcher.size);
  if (!variables.has(launcher.rank)) {
    const bool is_other_size = launcher.rank == std::string_view("PALS_RANKID");  // its size is PMI's variable
    if (outer || !gives_size || is_other_size) return std::nullopt;
  } else if (!gives_size) {
    const bool is_given = variables.has("RANK") && variables.has("WORLD_SIZE");
    if (is_given || (outer && outer->rank == variables.number(launcher.rank, 0, kMaxRanks - 1))) return std::nullopt;
    if (!variables.has("WORLD_SIZE"))
      fail(launcher.name, " has started this process, but does not give the number of ranks: ",
           variables.describe({launcher.rank, launcher.size == nullptr ? "WORLD_SIZE" : launcher.size}),
           "; set WORLD_SIZE on all ranks, and for several hosts MASTER_ADDR and MASTER_PORT");
  }
  return read_group(variables, launcher.name, launcher.rank, gives_size ? launcher.size : "WORLD_SIZE");
}

struct MpiGroup {
  const MpiLauncher& launcher;
  Group group;
};

// Returns the innermost group of kMpiLaunchers that has more than one rank. Skips a group that equals srun's group
// (`slurm_step`), because srun has set the launcher's variables. Exception: srun sets no variables of Open MPI.
std::optional<MpiGroup> read_mpi_groups(const Variables& variables, const std::optional<Group>& slurm_step) {
  std::optional<Group> outer = slurm_step;
  for (const MpiLauncher& launcher : kMpiLaunchers) {
    const auto group = read_mpi_group(variables, launcher, outer);
    if (!group) continue;
    const bool is_srun = slurm_step && *group == *slurm_step && &launcher != &kOpenMpi;
    if (group->size > 1 && !is_srun) return MpiGroup{launcher, *group};
    outer = group;
  }
  return std::nullopt;
}

// Returns whether SLURM_PROCID and SLURM_NTASKS describe a task of srun: if a step's variable is set, or if the user
// set them by hand (no SLURM_SUBMIT_DIR). Batch scripts (SLURM_PROCID=0, the job's SLURM_NTASKS) and salloc's shells
// (SLURM_NTASKS) are not tasks: they have SLURM_SUBMIT_DIR, but no step's variable.
bool in_slurm_step(const Variables& variables) {
  if (variables.first_text({"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"})) return true;
  return !variables.has("SLURM_SUBMIT_DIR") && (variables.has("SLURM_PROCID") || variables.has("SLURM_NTASKS"));
}

std::optional<Group> read_slurm_group(const Variables& variables) {
  if (!in_slurm_step(variables)) return std::nullopt;
  // SLURM_NTASKS may be the number of the whole job, so the step's own number takes precedence.
  const char* size_name = variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  return read_group(variables, "Slurm", "SLURM_PROCID", size_name);
}

// Returns torchrun's group. Returns nullopt if it is not set, or if it is incomplete and agrees with `other`: scripts
// for Slurm and MPI often export only RANK or WORLD_SIZE for other programs. If both launchers name a group, the groups
// must be equal, or each rank of the other launcher must have started LOCAL_WORLD_SIZE ranks of torchrun.
std::optional<Group> read_torchrun_group(const Variables& variables, const std::optional<Group>& other) {
  const auto rank = variables.number("RANK", 0, kMaxRanks - 1);
  const auto size = variables.number("WORLD_SIZE", 1, kMaxRanks);
  const bool is_whole = rank.has_value() == size.has_value();
  if (!other && !is_whole) variables.fail_half_set_torchrun("all of them, or none for a world of one");
  if (other && (rank || size)) {
    const bool is_same = rank.value_or(other->rank) == other->rank && size.value_or(other->size) == other->size;
    if (is_same && !is_whole) return std::nullopt;
    const auto local = variables.number("LOCAL_WORLD_SIZE", 1, kMaxRanks);
    const bool is_nested =
        rank && size && local && int64_t{other->size} * *local == *size && *rank / *local == other->rank;
    if (!is_same && !is_nested)
      fail("two launchers contradict each other: ", variables.describe({"RANK", "WORLD_SIZE"}), ", but ",
           other->launcher, "'s ", variables.describe({other->rank_name, other->size_name}),
           "; unset the variables of one of them");
  }
  // Kubernetes and shell scripts set RANK and WORLD_SIZE without torchrun.
  const char* launcher = variables.has("TORCHELASTIC_RUN_ID") ? kTorchrun
                         : variables.has(kAgentStore)         ? kSpawnLocal
                                                              : kByHand;
  return read_group(variables, launcher, "RANK", "WORLD_SIZE");
}

std::string master_address(const Variables& variables) {
  const std::string address = variables.text("MASTER_ADDR").value_or("");
  if (address.starts_with('[') || address.ends_with(']'))
    fail("MASTER_ADDR=", address, ": expected a name or an address without brackets, such as ::1");
  return address;
}

LaunchEnvironment start_environment(const Variables& variables, const Group& group) {
  return {.launcher = group.launcher,
          .rank = group.rank,
          .world_size = group.size,
          .local_rank = group.size == 1 ? 0 : -1,
          .local_world_size = group.size == 1 ? 1 : 0,
          .token = variables.text("TESSERA_STORE_TOKEN").value_or("")};
}

// Reads the local rank and size from the named variables, if set. On one host, a missing local rank equals the rank.
void read_local(const Variables& variables, const char* rank_name, const char* size_name,
                LaunchEnvironment& environment) {
  if (const auto size = variables.number(size_name, 1, environment.world_size)) environment.local_world_size = *size;
  if (const auto rank = variables.number(rank_name, 0, environment.world_size - 1)) environment.local_rank = *rank;
  if (environment.one_host() && environment.local_rank < 0) environment.local_rank = environment.rank;
  if (environment.local_world_size > 0 && environment.local_rank >= environment.local_world_size)
    fail(variables.describe({rank_name, size_name}), ": expected a local rank below the local size");
}

LaunchEnvironment parse_torchrun(const Variables& variables, const Group& group) {
  auto environment = start_environment(variables, group);
  environment.master_address = master_address(variables);
  environment.master_port = variables.number("MASTER_PORT", 1, kMaxPort).value_or(0);
  if (group.size > 1 && (environment.master_address.empty() || environment.master_port == 0))
    variables.fail_half_set_torchrun(
        "MASTER_ADDR and MASTER_PORT, where rank 0 is met, for a world of more than one rank");
  if ((environment.master_address == "localhost" || is_loopback_address(environment.master_address)) &&
      !variables.has("LOCAL_WORLD_SIZE"))
    environment.local_world_size = group.size;  // a loopback address reaches only processes of this host
  read_local(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE", environment);
  environment.job = variables.text("TORCHELASTIC_RUN_ID").value_or("");
  environment.agent_serves_store = variables.text(kAgentStore) == "True";
  environment.restart_count = variables.number("TORCHELASTIC_RESTART_COUNT", 0, INT32_MAX).value_or(0);
  return environment;
}

// Sets the address from MASTER_ADDR, or to loopback on one host. Sets the port from MASTER_PORT, or from the job's id.
void find_master(const Variables& variables, const char* id_name, LaunchEnvironment& environment) {
  environment.master_address = master_address(variables);
  if (environment.master_address.empty() && environment.one_host()) environment.master_address = "127.0.0.1";
  if (const auto port = variables.number("MASTER_PORT", 1, kMaxPort)) {
    environment.master_port = *port;
  } else if (!environment.job.empty()) {
    environment.master_port = derived_port(environment.job);
  } else {
    variables.fail_half_set(environment.launcher, {id_name, "MASTER_PORT"},
                            "one of the two, for the port where rank 0 is met");
  }
}

// Returns an id of the process that serves PMI to the ranks of this host. The id is equal on all of these ranks. Hydra
// makes a socket pair for each rank, and the kernel records its creator. Returns "" if the process is unknown.
std::string pmi_server(const Variables& variables) {
  if (const auto port = variables.text("PMI_PORT")) return *port;
  const auto descriptor = variables.number("PMI_FD", 0, INT32_MAX);
  ucred server{};
  socklen_t length = sizeof(server);
  if (!descriptor || ::getsockopt(*descriptor, SOL_SOCKET, SO_PEERCRED, &server, &length) != 0 || server.pid <= 0)
    return {};
  return c10::str("pmi-", server.pid);
}

LaunchEnvironment parse_mpi(const Variables& variables, const MpiLauncher& launcher, const Group& group) {
  auto environment = start_environment(variables, group);
  if (variables.number("FLUX_JOB_NNODES", 1, kMaxRanks) == 1) environment.local_world_size = group.size;
  const auto own_or = [&](const char* name, const char* otherwise) {
    return name != nullptr && variables.has(name) ? name : otherwise;
  };
  read_local(variables, own_or(launcher.local_rank, "LOCAL_RANK"), own_or(launcher.local_size, "LOCAL_WORLD_SIZE"),
             environment);
  if (&launcher == &kOpenMpi) environment.job = variables.text("OMPI_MCA_ess_base_jobid").value_or("");
  if (environment.job.empty() && launcher.id != nullptr) environment.job = variables.text(launcher.id).value_or("");
  if (environment.job.empty() && environment.one_host()) environment.job = pmi_server(variables);
  if (environment.job.empty() && launcher.id == nullptr && !variables.has("MASTER_PORT"))
    fail(launcher.name,
         " gives no id of the job, from which a port could be derived: ", variables.describe({"MASTER_PORT"}),
         "; set it on all ranks, to a free port of rank 0's host");
  find_master(variables, launcher.id, environment);
  if (environment.master_address.empty())
    fail(launcher.name, "'s ranks are on several hosts, or it does not give the number of ranks on this host (",
         variables.describe({group.size_name, own_or(launcher.local_size, "LOCAL_WORLD_SIZE"), "MASTER_ADDR"}),
         "); expected MASTER_ADDR, the address of rank 0's host: ", launcher.export_option);
  return environment;
}

// Returns the number of tasks on this node; 0 if Slurm's variables lack the number, or belong to another step.
int slurm_local_size(const Variables& variables, int world_size, size_t hosts) {
  if (hosts == 1) return world_size;
  if (const auto text = variables.first_text({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"})) {
    const auto counts = expand_task_counts(*text);
    const auto node = variables.number("SLURM_NODEID", 0, kMaxRanks).value_or(0);
    const bool even = std::ranges::adjacent_find(counts, std::not_equal_to<>()) == counts.end();
    const bool of_this_step = std::accumulate(counts.begin(), counts.end(), int64_t{0}) == world_size;
    if (of_this_step && (even || variables.has("SLURM_NODEID")) && static_cast<size_t>(node) < counts.size())
      return counts[static_cast<size_t>(node)];
  }
  const auto per_node = variables.number("SLURM_NTASKS_PER_NODE", 1, kMaxRanks).value_or(0);
  const bool fits = int64_t{per_node} * static_cast<int64_t>(std::max<size_t>(hosts, 1)) == world_size;
  return fits ? per_node : 0;
}

LaunchEnvironment parse_slurm(const Variables& variables, const Group& group) {
  auto environment = start_environment(variables, group);
  const auto list = variables.first_text({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  const auto hosts = list ? expand_host_list(*list) : std::vector<std::string>();
  environment.local_world_size = slurm_local_size(variables, group.size, hosts.size());
  if (const auto rank = variables.number("SLURM_LOCALID", 0, group.size - 1)) environment.local_rank = *rank;
  if (environment.one_host() && environment.local_rank < 0) environment.local_rank = environment.rank;

  if (const auto id = variables.first_text({"SLURM_JOB_ID", "SLURM_JOBID"}))
    environment.job = *id + "." + variables.first_text({"SLURM_STEP_ID", "SLURM_STEPID"}).value_or("0");
  find_master(variables, "SLURM_JOB_ID", environment);
  if (environment.master_address.empty() && !hosts.empty()) {
    if (group.rank == 0 && variables.number("SLURM_NODEID", 0, kMaxRanks).value_or(0) > 0)
      fail("Slurm has started rank 0 on another node than the first of ", *list, ": ",
           variables.describe({"SLURM_NODEID", "SLURM_DISTRIBUTION", "MASTER_ADDR"}),
           "; set MASTER_ADDR on all ranks, to the host of rank 0");
    environment.master_address = hosts.front();
  }
  if (environment.master_address.empty())
    variables.fail_half_set(
        "Slurm", {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "MASTER_ADDR"},
        "a list of nodes or MASTER_ADDR, for the host of rank 0");
  return environment;
}

// Returns a world of one, for a process that no launcher has started.
LaunchEnvironment parse_none(const Variables& variables) {
  LaunchEnvironment environment;
  const bool in_slurm_job = variables.has("SLURM_SUBMIT_DIR") && !in_slurm_step(variables);
  if (in_slurm_job && variables.number("SLURM_NTASKS", 1, kMaxRanks).value_or(1) > 1)
    environment.note =
        c10::str("this process belongs to a Slurm job (", variables.describe({"SLURM_JOB_ID", "SLURM_NTASKS"}),
                 ") but srun did not start it: it is a world of one");
  const bool in_launcher =
      in_slurm_job || variables.has("SLURM_PROCID") ||
      std::ranges::any_of(kMpiLaunchers, [&](const MpiLauncher& launcher) { return variables.has(launcher.rank); });
  if (!in_launcher && (variables.has("MASTER_ADDR") || variables.has("MASTER_PORT")))
    variables.fail_half_set_torchrun("all of them, or none for a world of one");
  return environment;
}

// Splits at commas. A text without commas is one piece.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> pieces;
  for (size_t begin = 0; begin <= text.size(); begin += pieces.back().size() + 1)
    pieces.push_back(text.substr(begin, text.find(',', begin) - begin));
  return pieces;
}

[[noreturn]] void fail_malformed(std::string_view list) { fail("cannot read the list of nodes \"", list, "\""); }

// Expands the entries between two brackets. Keeps the width of the first number of a range: "03-05,9" -> 03 04 05 9.
std::vector<std::string> expand_ranges(std::string_view ranges, std::string_view list) {
  std::vector<std::string> entries;
  for (const auto range : split(ranges)) {
    const auto dash = range.find('-');
    const auto first_text = range.substr(0, dash);
    const auto first = to_number(first_text);
    const auto last = dash == std::string_view::npos ? first : to_number(range.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last - *first >= int64_t{kMaxHosts}) fail_malformed(list);
    for (int64_t number = *first; number <= *last; ++number) {
      auto digits = std::to_string(number);
      if (digits.size() < first_text.size()) digits.insert(0, first_text.size() - digits.size(), '0');
      entries.push_back(std::move(digits));
    }
  }
  return entries;
}

// Expands one host expression. It may contain any number of bracket pairs, and commas only inside them.
std::vector<std::string> expand_host(std::string_view host, std::string_view list) {
  const auto open = host.find('['), close = host.find(']');
  if (open == std::string_view::npos && close == std::string_view::npos) return {std::string(host)};
  if (close == std::string_view::npos || close < open) fail_malformed(list);
  const auto entries = expand_ranges(host.substr(open + 1, close - open - 1), list);
  const auto tails = expand_host(host.substr(close + 1), list);
  if (entries.size() * tails.size() > kMaxHosts) fail("too many nodes in \"", list, "\"");
  std::vector<std::string> hosts;
  for (const auto& entry : entries)
    for (const auto& tail : tails) hosts.push_back(c10::str(host.substr(0, open), entry, tail));
  return hosts;
}

}  // namespace

std::vector<std::string> expand_host_list(std::string_view list) {
  std::vector<std::string> hosts;
  for (size_t begin = 0, end = 0; begin <= list.size(); begin = end + 1) {
    for (end = begin; end < list.size() && list[end] != ','; ++end)
      if (list[end] == '[') end = std::min(list.find(']', end), list.size() - 1);
    if (end == begin) fail_malformed(list);
    auto expanded = expand_host(list.substr(begin, end - begin), list);
    std::move(expanded.begin(), expanded.end(), std::back_inserter(hosts));
    if (hosts.size() > kMaxHosts) fail("too many nodes in \"", list, "\"");
  }
  return hosts;
}

std::vector<int> expand_task_counts(std::string_view counts) {
  std::vector<int> expanded;
  for (const auto entry : split(counts)) {
    const auto open = entry.find("(x");
    const bool is_repeated = open != std::string_view::npos;
    const auto tasks = to_number(entry.substr(0, open));
    const auto nodes = is_repeated && entry.ends_with(')') ? to_number(entry.substr(open + 2, entry.size() - open - 3))
                                                           : std::optional<int64_t>(is_repeated ? 0 : 1);
    if (!tasks || !nodes || *tasks < 0 || *tasks > kMaxRanks || *nodes < 1 || *nodes > int64_t{kMaxHosts})
      fail("cannot read the tasks per node \"", counts, "\", as in 4(x2),3");
    expanded.insert(expanded.end(), static_cast<size_t>(*nodes), static_cast<int>(*tasks));
  }
  return expanded;
}

int derived_port(std::string_view text) noexcept {
  const uint64_t hash = Fingerprint().add(text).value();
  return 15000 + static_cast<int>((hash ^ (hash >> 32)) % 16000);
}

LaunchEnvironment parse_launch_environment(const GetVariable& get) {
  const Variables variables(get);
  // If torchrun started this process, the launcher that started torchrun is ignored.
  const bool by_torchrun = variables.has("TORCHELASTIC_RUN_ID");
  const bool has_step = !by_torchrun && variables.has("SLURM_PROCID") &&
                        variables.first_text({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}).has_value();
  const auto step = has_step ? read_slurm_group(variables) : std::nullopt;
  const auto mpi = by_torchrun ? std::nullopt : read_mpi_groups(variables, step);
  auto slurm = by_torchrun || mpi ? std::nullopt : read_slurm_group(variables);
  if (slurm && slurm->size == 1) slurm.reset();
  const auto other = mpi ? std::optional<Group>(mpi->group) : slurm;
  if (const auto torchrun = read_torchrun_group(variables, other)) return parse_torchrun(variables, *torchrun);
  // Checked before Slurm: under mpirun, Slurm's variables describe the daemon that mpirun started with srun.
  if (mpi) return parse_mpi(variables, mpi->launcher, mpi->group);
  if (slurm) return parse_slurm(variables, *slurm);
  return parse_none(variables);
}

LaunchEnvironment read_launch_environment() {
  return parse_launch_environment([](const char* name) { return std::getenv(name); });
}

}  // namespace tessera::internal
