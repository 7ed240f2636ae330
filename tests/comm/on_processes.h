#pragma once

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <cstdio>
#include <exception>
#include <functional>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/temporary_folder.h"

namespace tessera::testing_support {
using namespace internal;

// Runs ranks as forked processes. Returns their exit codes, 128 + signal for a killed one.
inline std::vector<int> on_processes(int world,
                                     const std::function<int(c10::intrusive_ptr<c10d::Store>, int rank)>& body) {
  const TemporaryFolder folder;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 99;
      try {
        code = body(c10::make_intrusive<c10d::FileStore>((folder / "store").string(), world), rank);
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  // Reaps in order, so a later process that dies stays a zombie, and its process id exists.
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

}  // namespace tessera::testing_support
