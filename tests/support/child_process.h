#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tessera::testing_support {

// A program that a test runs, with its output in a file. It leads its own session, which the destructor kills.
class ChildProcess {
 public:
  using Environment = std::map<std::string, std::string>;
  // Time after which a program counts as hung. On a busy machine, programs of 10 s take 60 s.
  static constexpr std::chrono::seconds kHangs{180};

  explicit ChildProcess(const std::vector<std::string>& command, const Environment& environment = {}) {
    char path[] = "/tmp/tessera-test-XXXXXX";
    const int output = ::mkstemp(path);
    if (output < 0) throw std::runtime_error("mkstemp failed");
    path_ = path;
    std::vector<char*> argv;
    for (const auto& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::setsid();
      ::dup2(output, STDOUT_FILENO);
      ::dup2(output, STDERR_FILENO);
      ::close(output);
      for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
      ::execvp(argv[0], argv.data());
      std::perror(argv[0]);
      ::_exit(127);
    }
    ::close(output);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() {
    ::kill(-pid_, SIGKILL);
    if (running_) ::waitpid(pid_, nullptr, 0);
    ::unlink(path_.c_str());
  }

  pid_t pid() const { return pid_; }

  std::string output() const {
    std::ifstream file(path_);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  // Returns how often `text` has been printed so far.
  int printed(const std::string& text) const {
    const auto all = output();
    int count = 0;
    for (auto at = all.find(text); at != std::string::npos; at = all.find(text, at + 1)) ++count;
    return count;
  }

  // Blocks until `text` has been printed `times` times; returns false on timeout.
  bool await(const std::string& text, int times, std::chrono::seconds limit = kHangs) const {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (printed(text) < times) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }

  // Returns the exit code, 128 + signal if a signal ended it, or -1 on timeout.
  int wait(std::chrono::seconds limit = kHangs) {
    const auto end = std::chrono::steady_clock::now() + limit;
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) != pid_) {
      if (std::chrono::steady_clock::now() > end) return -1;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    running_ = false;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  std::string path_;
  pid_t pid_ = -1;
  bool running_ = true;
};

}  // namespace tessera::testing_support
