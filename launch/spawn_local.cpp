#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tessera/launch/launch.h"

extern char** environ;

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// How long ranks that were asked to end may take before they are killed.
constexpr std::chrono::seconds kGrace{5};
constexpr timespec kPollInterval{0, 100'000'000};

[[noreturn]] void throw_errno(const char* call) {
  throw std::system_error(errno, std::generic_category(), std::string("tessera::spawn_local: ") + call);
}

// The socket at which rank 0 will serve the store. It is bound here and handed down, so that no
// other program can take the port in between; and it listens already, so that a rank that is
// faster than rank 0 queues up instead of being refused.
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
      errno = error;
      throw_errno("bind to a free port of 127.0.0.1");
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
  int port() const noexcept { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

// Blocks the signals that supervise() waits for, until the end of the scope. SIGCHLD must not be
// ignored meanwhile, or the kernel would discard how a child ended. What the caller ignores
// (SIGHUP under nohup) stays ignored.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&waited_);
    sigaddset(&waited_, SIGCHLD);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action {};
      ::sigaction(signal, nullptr, &action);
      if (action.sa_handler != SIG_IGN) sigaddset(&waited_, signal);
    }
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &action, &old_child_action_);
    ::pthread_sigmask(SIG_BLOCK, &waited_, &old_mask_);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  ~BlockedSignals() {
    ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
    ::sigaction(SIGCHLD, &old_child_action_, nullptr);
  }

  const sigset_t& waited() const noexcept { return waited_; }
  const sigset_t& old_mask() const noexcept { return old_mask_; }

 private:
  sigset_t waited_{};
  sigset_t old_mask_{};
  struct sigaction old_child_action_ {};
};

// NAME=value texts of a child's environment: this process's own, with torchrun's set anew.
std::vector<std::string> child_environment(int rank, int world, const ListeningSocket& socket) {
  std::vector<std::string> entries = {"RANK=" + std::to_string(rank),
                                      "WORLD_SIZE=" + std::to_string(world),
                                      "LOCAL_RANK=" + std::to_string(rank),
                                      "LOCAL_WORLD_SIZE=" + std::to_string(world),
                                      "MASTER_ADDR=127.0.0.1",
                                      "MASTER_PORT=" + std::to_string(socket.port()),
                                      "TESSERA_STORE_FD=" + std::to_string(socket.fd())};
  // Every rank would otherwise start a thread per core, and the ranks would fight for the cores:
  // far slower than one process. torchrun gives each rank 1 thread; the cores divided by the ranks
  // leaves none idle either.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    entries.push_back("OMP_NUM_THREADS=" + std::to_string(std::max(1, cores / world)));
  }
  const size_t ours = entries.size();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto name = text.substr(0, text.find('=') + 1);
    const bool replaced = std::any_of(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(ours),
                                      [&](const std::string& own) { return own.starts_with(name); }) ||
                          name.starts_with("TORCHELASTIC_");
    if (!replaced) entries.push_back(text);
  }
  return entries;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// What a child needs between fork and exec, where it may neither allocate nor lock, since other
// threads of the parent may have held any lock at the fork.
struct Program {
  const char* path;
  char** argv;
  char** environment;
  sigset_t signal_mask;
  int kept_fd;  // -1: none
  pid_t parent;
};

[[noreturn]] void become(const Program& program) {
  // No orphans: the kernel kills this process when the parent ends. If the parent has ended before
  // this call, nobody would, so look who the parent is afterwards.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != program.parent) ::_exit(127);
  if (program.kept_fd >= 0) ::fcntl(program.kept_fd, F_SETFD, 0);
  ::pthread_sigmask(SIG_SETMASK, &program.signal_mask, nullptr);
  ::execve(program.path, program.argv, program.environment);
  ::execve("/proc/self/exe", program.argv, program.environment);  // the file was moved or deleted
  constexpr char kMessage[] = "tessera::spawn_local: this program could not be started again\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  ::_exit(127);
}

// This program's file. By its name, and not as /proc/self/exe, so that ps shows it.
std::string program_path() {
  std::array<char, 4096> path{};
  const auto length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  if (length < 0) throw_errno("readlink /proc/self/exe");
  return {path.data(), static_cast<size_t>(length)};
}

std::string describe_signal(int signal) {
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
}

// The local ranks while they run.
class Ranks {
 public:
  Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  // Only an exception leaves any alive.
  ~Ranks() {
    send(SIGKILL);
    for (const pid_t pid : pids_) {
      if (pid > 0) ::waitpid(pid, nullptr, 0);
    }
  }

  void start(Program program) {
    std::fflush(nullptr);  // a child that cannot exec must not print the parent's buffers again
    const pid_t pid = ::fork();
    if (pid < 0) throw_errno("fork");
    if (pid == 0) become(program);
    pids_.push_back(pid);
  }

  // Runs until all have ended; returns the exit code for main().
  int supervise(const sigset_t& waited) {
    while (alive() > 0) {
      siginfo_t info{};
      const int signal = ::sigtimedwait(&waited, &info, &kPollInterval);
      if (signal == SIGCHLD) {
        reap_pid(info.si_pid);  // the first to end, when several have: the one whose error matters
      } else if (signal > 0) {
        interrupt(signal, info.si_code);
      }
      for (const pid_t pid : std::vector<pid_t>(pids_)) reap_pid(pid);
      if (kill_at_ && Clock::now() >= *kill_at_) kill_rest();
    }
    return code_.value_or(0);
  }

 private:
  size_t alive() const {
    return static_cast<size_t>(std::count_if(pids_.begin(), pids_.end(), [](pid_t pid) { return pid > 0; }));
  }

  void send(int signal) const {
    for (const pid_t pid : pids_) {
      if (pid > 0) ::kill(pid, signal);
    }
  }

  void reap_pid(pid_t pid) {
    const auto found = std::find(pids_.begin(), pids_.end(), pid);
    int status = 0;
    if (pid <= 0 || found == pids_.end() || ::waitpid(pid, &status, WNOHANG) != pid) return;
    *found = 0;
    const bool signalled = WIFSIGNALED(status);
    const int code = signalled ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (code == 0 || code_) return;  // later ends are consequences: of the first, or of our signals
    code_ = code;
    const auto how =
        signalled ? "was ended by " + describe_signal(WTERMSIG(status)) : "exited with code " + std::to_string(code);
    std::fprintf(stderr, "tessera: rank %d (pid %d) %s%s\n", static_cast<int>(found - pids_.begin()),
                 static_cast<int>(pid), how.c_str(), alive() > 0 ? "; ending the others" : "");
    end_rest(SIGTERM);
  }

  void interrupt(int signal, int origin) {
    if (interrupted_) return kill_rest();  // asked for the second time: no more grace
    interrupted_ = true;
    std::fprintf(stderr, "tessera: %s; ending all ranks\n", describe_signal(signal).c_str());
    code_ = code_.value_or(128 + signal);
    // A key on the terminal has signalled the whole foreground group, the ranks among it.
    if (origin == SI_KERNEL) signal = 0;
    end_rest(signal);
  }

  void end_rest(int signal) {
    send(signal);
    if (!kill_at_) kill_at_ = Clock::now() + kGrace;
  }

  void kill_rest() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] > 0) {
        std::fprintf(stderr, "tessera: rank %zu (pid %d) did not end; killing it\n", rank,
                     static_cast<int>(pids_[rank]));
      }
    }
    send(SIGKILL);
    kill_at_ = Clock::time_point::max();
  }

  std::vector<pid_t> pids_;  // by rank; 0: has ended
  std::optional<int> code_;  // of the first failure
  std::optional<Clock::time_point> kill_at_;
  bool interrupted_ = false;
};

}  // namespace

int spawn_local(int world, int argc, char** argv) {
  if (world < 1) {
    throw std::invalid_argument("tessera::spawn_local: world is " + std::to_string(world) + "; expected at least 1");
  }
  if (launched()) {
    throw std::logic_error(
        "tessera::spawn_local: a launcher has started this process already as a rank (see launched()); "
        "expected to be called outside of a group");
  }
  ListeningSocket socket;
  const std::string path = program_path();
  std::vector<char*> arguments(argv, argv + argc);
  arguments.push_back(nullptr);

  const BlockedSignals signals;
  Ranks ranks;
  for (int rank = 0; rank < world; ++rank) {
    auto environment = child_environment(rank, world, socket);
    auto environment_pointers = pointers_to(environment);
    ranks.start({.path = path.c_str(),
                 .argv = arguments.data(),
                 .environment = environment_pointers.data(),
                 .signal_mask = signals.old_mask(),
                 .kept_fd = rank == 0 ? socket.fd() : -1,
                 .parent = ::getpid()});
  }
  // From here on rank 0 alone holds the socket: if it dies, the others are refused and do not wait.
  socket.close();
  return ranks.supervise(signals.waited());
}

}  // namespace tessera
