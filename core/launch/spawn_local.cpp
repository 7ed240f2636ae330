#include <arpa/inet.h>
#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <tessera/launch.h>
#include "core/comm/descriptors.h"
#include "core/comm/store_client.h"
#include "core/launch/launch_environment.h"
#include "core/launch/local_address.h"
#include "core/launch/process_setup.h"
#include "core/launch/rendezvous.h"
#include "core/launch/spawn_surviving.h"
#include "core/runtime/host.h"
#include "core/runtime/require.h"
#include "core/runtime/run_clock.h"

extern char** environ;

namespace tessera {
using namespace internal;
namespace {

// The longest time from SIGTERM to SIGKILL after the failure of a rank.
constexpr std::chrono::milliseconds kGraceAfterFailure{5000};
constexpr std::chrono::seconds kOwnStore{10};  // timeout for calls of the store, which is in this process
constexpr int kPollIntervalMs = 100;
constexpr int kForwardedSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

[[noreturn]] void throw_errno(const char* call, int error = errno) {
  throw std::system_error(error, std::generic_category(), std::string("tessera::spawn_local: ") + call);
}

// The store's listening socket. It is bound before the ranks start, because the ranks need its port. Their connections
// queue up until the store exists.
class ListeningSocket {
 public:
  ListeningSocket() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (fd_ < 0) throw_errno("socket");
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    if (::bind(fd_, reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(fd_, SOMAXCONN) != 0 ||
        ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      const int error = errno;
      close();
      throw_errno("bind to a free port of 127.0.0.1", error);
    }
    port_ = ntohs(address.sin_port);
  }
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;
  ~ListeningSocket() { close(); }

  void close() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  int fd() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }
  int port() const noexcept { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

std::atomic<pthread_t> supervisor;  // the thread of supervise()

// Handles a signal in another thread, which does not block it: queues it for supervise(), with its origin as the value.
extern "C" void pass_to_supervisor(int signal, siginfo_t* info, void*) {
  ::pthread_sigqueue(supervisor, signal, {.sival_int = info->si_code});
}

void set_action(int signal, const struct sigaction& action) { ::sigaction(signal, &action, nullptr); }

// Blocks the forwarded signals until the end of the scope, because supervise() reads them from a descriptor. Signals
// that the caller ignores (SIGHUP under nohup) stay ignored.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t waited;
    sigemptyset(&waited);
    for (const int signal : kForwardedSignals) {
      struct sigaction action {};
      ::sigaction(signal, nullptr, &action);
      if (action.sa_handler == SIG_IGN) continue;
      sigaddset(&waited, signal);
      old_actions_[signal] = action;
    }
    fd_ = ::signalfd(-1, &waited, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd_ < 0) throw_errno("signalfd");
    ::pthread_sigmask(SIG_BLOCK, &waited, &old_mask_);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  ~BlockedSignals() {
    for (const auto& [signal, action] : old_actions_) set_action(signal, action);
    ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
    ::close(fd_);
  }

  // Lets other threads of the program pass the signals on. Must be called after the fork of the keeper.
  void collect() {
    supervisor = ::pthread_self();
    struct sigaction passing {};
    passing.sa_sigaction = &pass_to_supervisor;
    passing.sa_flags = SA_SIGINFO | SA_RESTART;
    for (const auto& [signal, action] : old_actions_) set_action(signal, passing);
  }

  int fd() const noexcept { return fd_; }
  const sigset_t& old_mask() const noexcept { return old_mask_; }

 private:
  int fd_ = -1;
  sigset_t old_mask_{};
  std::map<int, struct sigaction> old_actions_;  // by signal
};

// Returns a child's environment as NAME=value texts: that of this process, with new values of torchrun's variables.
std::vector<std::string> child_environment(int rank, int world, const ListeningSocket& socket, const std::string& token,
                                           const std::map<std::string, std::string>& added) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto name = text.substr(0, text.find('='));
    if (!name.starts_with("TORCHELASTIC_")) variables[name] = text.substr(std::min(name.size() + 1, text.size()));
  }
  for (const char* name : {"RANK", "LOCAL_RANK"}) variables[name] = std::to_string(rank);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) variables[name] = std::to_string(world);
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = std::to_string(socket.port());
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";  // the store is in this process, and outlives all ranks
  variables["TESSERA_STORE_TOKEN"] = token;
  // By default every rank would start a thread per core, and the ranks would be far slower than a single process.
  // torchrun gives each rank one thread. Here the ranks share the cores, so that no core is idle.
  variables.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / world)));
  for (const auto& [name, value] : added) variables[name] = value;

  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(c10::str(name, "=", value));
  return entries;
}

c10::intrusive_ptr<c10d::Store> serve(ListeningSocket& socket) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(socket.port());
  options.isServer = true;
  options.masterListenFd = socket.release();
  options.timeout = kOwnStore;
  return StoreClient::of(open_tcp_store("127.0.0.1", options), kOwnStore);
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// [Note: the keeper] This process may have a thread that reaps every child, or ignore SIGCHLD. Then a rank's exit
// status would be lost, and its process id could be reused. So the ranks are children of an intermediate process, the
// keeper. Only supervise() can reap the keeper: it has no exit signal, and wait() and SIG_IGN reap only children that
// have one. The keeper never calls exec. Other threads of this process may have held any lock when clone() made the
// keeper, so the keeper must not allocate or lock. It only makes system calls.
//
// The keeper starts the ranks and reports the exit status of each rank. It forwards signals from this process to the
// ranks, except SIGUSR2, for which it sends SIGKILL. SIGRTMIN, which is queued, carries the number of a rank to
// restart. The keeper ends after the ranks. If the keeper is killed, the kernel kills the ranks.

struct Program {
  const char* path;
  char** argv;
  char** environment;
  char** restart_environment;
};

// A message of the keeper to this process, sent by one write().
struct Report {
  enum Kind : int32_t { kStarted, kEnded, kFailed } kind;
  int32_t rank;
  pid_t pid;
  int32_t status;  // kEnded: waitpid()'s status; kFailed: errno of fork
};

struct Keeper {
  const std::vector<Program>& programs;
  const std::span<pid_t> pids;  // process ids, indexed by rank; 0 if the rank does not run
  const sigset_t rank_signal_mask;
  const pid_t parent;
  const int reports_fd;
  const int listening_fd;

  [[noreturn]] void run() const;

 private:
  void start(size_t rank, char** environment) const;
  [[noreturn]] void become(const Program& program, char** environment, pid_t keeper) const;
  void report(Report::Kind kind, size_t rank, int status) const {
    const Report text{kind, static_cast<int32_t>(rank), pids[rank], status};
    [[maybe_unused]] const auto written = ::write(reports_fd, &text, sizeof(text));
  }
  bool reap(pid_t wanted) const;
};

// fork() without pthread_atfork's handlers, which may lock.
pid_t fork_plainly(int signal_of_end) { return static_cast<pid_t>(::syscall(SYS_clone, signal_of_end, 0, 0, 0, 0)); }

void Keeper::start(size_t rank, char** environment) const {
  const pid_t self = ::getpid(), pid = fork_plainly(SIGCHLD);
  if (pid == 0) become(programs[rank], environment, self);
  pids[rank] = std::max(pid, 0);
  report(pid > 0 ? Report::kStarted : Report::kFailed, rank, errno);
}

void Keeper::become(const Program& program, char** environment, pid_t keeper) const {
  // The kernel kills this process when its parent ends. If the parent has already ended, the check below exits.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != keeper) ::_exit(127);
  ::pthread_sigmask(SIG_SETMASK, &rank_signal_mask, nullptr);
  ::execve(program.path, program.argv, environment);
  ::execve("/proc/self/exe", program.argv, environment);  // works even if the file was moved or deleted
  constexpr char kMessage[] = "tessera::spawn_local: this program could not be started again\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  ::_exit(127);
}

// Reaps the child `wanted` if it has ended; -1 means any child. Returns whether a child was reaped.
bool Keeper::reap(pid_t wanted) const {
  int status = 0;
  const pid_t pid = ::waitpid(wanted, &status, WNOHANG);
  for (size_t rank = 0; pid > 0 && rank < pids.size(); ++rank) {
    if (pids[rank] != pid) continue;
    report(Report::kEnded, rank, status);
    pids[rank] = 0;
  }
  return pid > 0;
}

void Keeper::run() const {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  sigset_t all, waited;
  sigfillset(&all);
  sigemptyset(&waited);
  for (const int signal : {SIGCHLD, SIGUSR2, SIGRTMIN}) sigaddset(&waited, signal);
  for (const int signal : kForwardedSignals) sigaddset(&waited, signal);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
  set_action(SIGCHLD, {});  // the default action

  for (size_t rank = 0; rank < programs.size(); ++rank) start(rank, programs[rank].environment);
  // Closes the inherited descriptors, above all the store's socket, which the keeper must not keep open.
  for (const auto& [first, last] :
       {std::pair{3U, static_cast<unsigned>(reports_fd) - 1}, std::pair{static_cast<unsigned>(reports_fd) + 1, ~0U}})
    ::syscall(SYS_close_range, first, last, 0);
  ::close(listening_fd);  // needed only if the kernel has no close_range
  while (std::ranges::any_of(pids, [](pid_t pid) { return pid > 0; })) {
    siginfo_t info{};
    const int signal = ::sigwaitinfo(&waited, &info);
    if (signal == SIGCHLD) {
      reap(info.si_pid);  // reported before other ranks: the first to end is usually the cause
      while (reap(-1)) {
      }
    } else if (signal == SIGRTMIN) {
      const auto rank = static_cast<size_t>(info.si_value.sival_int);
      if (info.si_pid == parent && rank < programs.size()) start(rank, programs[rank].restart_environment);
    } else if (signal > 0 && info.si_pid == parent) {  // a signal of the terminal reaches the ranks directly
      for (const pid_t pid : pids)
        if (pid > 0) ::kill(pid, signal == SIGUSR2 ? SIGKILL : signal);
    }
  }
  ::_exit(0);
}

std::string describe_signal(int signal) { return c10::str("signal ", signal, " (", ::strsignal(signal), ")"); }

std::string describe_status(int status) {
  return WIFSIGNALED(status) ? "was ended by " + describe_signal(WTERMSIG(status))
                             : c10::str("exited with code ", WEXITSTATUS(status));
}

void say(const std::string& line) { std::fprintf(stderr, "tessera: %s\n", line.c_str()); }

// The running local ranks, and the keeper that started them.
class Ranks {
 public:
  Ranks(const std::vector<Program>& programs, const BlockedSignals& signals, const ListeningSocket& socket,
        std::chrono::milliseconds grace, const Survival& survival)
      : grace_(grace), survival_(survival), pids_(programs.size(), 0), restarts_(programs.size(), 0) {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC) != 0) throw_errno("pipe2");
    reports_fd_ = fds[0];
    const Keeper keeper{programs, pids_, signals.old_mask(), ::getpid(), fds[1], socket.fd()};
    std::fflush(nullptr);  // otherwise a child that cannot exec would print the buffers again
    keeper_ = fork_plainly(0);
    if (keeper_ == 0) keeper.run();
    const int error = errno;
    ::close(fds[1]);
    if (keeper_ > 0) return;
    ::close(reports_fd_);
    throw_errno("fork", error);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  // If an exception was thrown, kills the ranks that are alive.
  ~Ranks() {
    if (keeper_ > 0) {
      ::kill(keeper_, SIGUSR2);
      ::waitpid(keeper_, nullptr, __WALL);
    }
    ::close(reports_fd_);
  }

  // Blocks until all ranks have ended; returns the exit code for main(). If a rank ends and the others continue, calls
  // `ended` with the number of the ended rank.
  int supervise(int signals_fd, std::function<void(int rank)> ended) {
    ended_ = std::move(ended);
    for (bool goes_on = true; goes_on;) {
      pollfd fds[] = {{reports_fd_, POLLIN, 0}, {signals_fd, POLLIN, 0}};
      ::poll(fds, std::size(fds), kPollIntervalMs);
      signalfd_siginfo signal{};
      if (fds[0].revents != 0) goes_on = read_report();
      if (::read(signals_fd, &signal, sizeof(signal)) == sizeof(signal))
        interrupt(static_cast<int>(signal.ssi_signo), signal.ssi_code == SI_QUEUE ? signal.ssi_int : signal.ssi_code);
      if (kill_at_ && RunClock::now() >= *kill_at_) kill_rest();
    }
    int status = 0;
    ::waitpid(std::exchange(keeper_, 0), &status, __WALL);
    if (alive() > 0) {  // the keeper has died first, so the kernel kills the ranks
      say("the process that watches over the ranks " + describe_status(status));
      code_ = code_.value_or(128 + SIGKILL);
    }
    return code_.value_or(0);
  }

 private:
  std::ptrdiff_t alive() const {
    return std::ranges::count_if(pids_, [](pid_t pid) { return pid > 0; });
  }

  // Whether code_ is that of a failure or an ending signal. A rank that SIGUSR1 has stopped has not failed.
  bool has_failed() const { return code_ && (signal_ != SIGUSR1 || code_ != 128 + SIGUSR1); }

  void send(int signal) const { ::kill(keeper_, signal == SIGKILL ? SIGUSR2 : signal); }

  // Returns false if the keeper has ended.
  bool read_report() {
    Report report{};
    const ssize_t count = ::read(reports_fd_, &report, sizeof(report));
    if (count != static_cast<ssize_t>(sizeof(report))) return count < 0 && errno == EINTR;
    pid_t& pid = pids_[static_cast<size_t>(report.rank)];
    const bool is_restarted = restarts_[static_cast<size_t>(report.rank)] > 0;
    if (report.kind != Report::kEnded && is_restarted) --starting_;
    if (report.kind == Report::kFailed && is_restarted) {
      say(c10::str("rank ", report.rank, " could not be started again: ", std::strerror(report.status)));
    } else if (report.kind == Report::kFailed) {
      throw_errno("fork", report.status);
    }
    pid = report.kind == Report::kStarted ? report.pid : 0;
    if (report.kind == Report::kEnded) note_end(report);
    return true;
  }

  void note_end(const Report& report) {
    const int status = report.status;
    const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    const bool is_stopped = signal_ == SIGUSR1 && code == 128 + SIGUSR1, is_well = code == 0 || is_stopped;
    ended_well_ += is_well ? 1 : 0;
    const auto rank = static_cast<size_t>(report.rank);
    const std::string text = c10::str("rank ", report.rank, " (pid ", report.pid, ") ", describe_status(status));
    // A restarted rank needs at least one living rank to join.
    if (!is_well && !has_failed() && restarts_[rank] < survival_.restarts && alive() > 0 &&
        alive() + starting_ + ended_well_ + 1 >= survival_.least_ranks && survival_.may_restart()) {
      ++restarts_[rank];
      ++starting_;
      say(c10::str(text, "; starting it again (", restarts_[rank], " of ", survival_.restarts, ")"));
      ::sigqueue(keeper_, SIGRTMIN, {.sival_int = report.rank});
      return;
    }
    const bool others_go_on = is_well || alive() + starting_ + ended_well_ >= survival_.least_ranks;
    if (others_go_on && !has_failed()) ended_(report.rank);
    if (is_stopped && !code_) code_ = code;
    // Only the first failure sets the exit code, because later ones follow from it or from our signals.
    if (is_well || has_failed()) return;
    if (others_go_on) return say(text + "; the others go on");
    code_ = code;
    say(text + (alive() > 0 ? "; ending the others" : ""));
    end_rest(SIGTERM, std::min(grace_, kGraceAfterFailure));
  }

  void interrupt(int signal, int origin) {
    const bool is_warning = signal == SIGUSR1, is_ending = signal_ != 0 && signal_ != SIGUSR1;
    if (is_ending && is_warning) return;
    if (is_ending) return kill_rest();  // a second signal ends the grace period
    say(describe_signal(signal) + (is_warning ? "; forwarding it to all ranks" : "; ending all ranks"));
    if (!is_warning && !has_failed()) code_ = 128 + signal;
    signal_ = signal;
    if (is_warning) return send(signal);
    // A key such as Ctrl-C has signalled the terminal's whole foreground process group, which includes the ranks.
    end_rest(origin == SI_KERNEL ? 0 : signal, grace_);
  }

  void end_rest(int signal, std::chrono::milliseconds grace) {
    send(signal);
    if (!kill_at_) kill_at_ = RunClock::now() + grace;
  }

  void kill_rest() {
    for (size_t rank = 0; rank < pids_.size(); ++rank)
      if (pids_[rank] > 0) say(c10::str("rank ", rank, " (pid ", pids_[rank], ") did not end; killing it"));
    send(SIGKILL);
    kill_at_ = RunClock::time_point::max();
  }

  const std::chrono::milliseconds grace_;
  const Survival& survival_;
  std::ptrdiff_t ended_well_ = 0;
  std::function<void(int rank)> ended_;
  std::vector<pid_t> pids_;    // process ids, indexed by rank; 0 if the rank does not run
  std::vector<int> restarts_;  // number of restarts, indexed by rank
  std::ptrdiff_t starting_ = 0;
  pid_t keeper_ = 0;
  int reports_fd_ = -1;
  std::optional<int> code_;  // exit code of the first failure or signal, or of ranks that SIGUSR1 has stopped
  std::optional<RunClock::time_point> kill_at_;
  int signal_ = 0;  // the newest signal to this process; SIGUSR1 is only a warning
};

}  // namespace

int spawn_local(int world, int argc, char** argv, std::chrono::milliseconds grace) {
  return spawn_surviving(world, argc, argv, grace, {.least_ranks = world});
}

int internal::spawn_surviving(int world, int argc, char** argv, std::chrono::milliseconds grace,
                              const Survival& survival) {
  require(world >= 1, "tessera::spawn_local: world is ", world, "; expected at least 1");
  require(grace >= grace.zero() && grace <= kLongestTimeout, "tessera::spawn_local: grace is ", grace.count(),
          " ms; expected at least 0 and at most a year");
  require<std::logic_error>(!read_launch_environment().launched(),
                            "tessera::spawn_local: a launcher has started this process already as a rank (see "
                            "launched()); expected to be called outside of a group");
  const ProcessEffects effects(
      {.cache_memory = false, .terminate_handler = false, .permit_tracing = false, .share_cores = false});
  require_descriptors(world, c10::str("the store of ", world, " ranks"), /*may_raise=*/true);
  ListeningSocket socket;
  try {
    require_loopback(socket.port());
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(c10::str("tessera::spawn_local: the ranks meet at 127.0.0.1: ", error.what()));
  }
  const std::string path = std::filesystem::read_symlink("/proc/self/exe");  // the real path, which ps shows
  std::vector<char*> arguments(argv, argv + argc);
  arguments.push_back(nullptr);

  const std::string token = c10::str(random_bits(), "-", random_bits());
  auto restart_variables = survival.variables;
  restart_variables.insert(survival.restart_variables.begin(), survival.restart_variables.end());
  std::vector<std::vector<std::string>> environments, restart_environments;
  std::vector<std::vector<char*>> pointers, restart_pointers;
  std::vector<Program> programs;
  for (int rank = 0; rank < world; ++rank) {
    environments.push_back(child_environment(rank, world, socket, token, survival.variables));
    restart_environments.push_back(child_environment(rank, world, socket, token, restart_variables));
    pointers.push_back(pointers_to(environments.back()));
    restart_pointers.push_back(pointers_to(restart_environments.back()));
    programs.push_back({path.c_str(), arguments.data(), pointers.back().data(), restart_pointers.back().data()});
  }
  BlockedSignals signals;
  Ranks ranks(programs, signals, socket, grace, survival);
  signals.collect();
  const auto store = serve(socket);  // after the fork, which would not copy the store's threads
  return ranks.supervise(signals.fd(), [&](int rank) {
    try {
      tell_of_end(store, token, rank);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the rendezvous then waits for its timeout
    }
  });
}

}  // namespace tessera
