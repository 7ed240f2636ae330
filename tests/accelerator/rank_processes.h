#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/temporary_folder.h"

namespace tessera::process_ranks {

inline constexpr const char* kStorePort = "TESSERA_TEST_STORE_PORT";
inline constexpr const char* kFolder = "TESSERA_TEST_FOLDER";

// Processes of this program that run one part, each as a rank with its own NCCL_HOSTID. The destructor kills them.
class RankProcesses {
 public:
  RankProcesses(const std::string& program, const std::string& part, int world) {
    const std::string port = std::to_string(testing_support::free_port());
    const std::string store_port = std::to_string(testing_support::free_port());
    for (int rank = 0; rank < world; ++rank)
      ranks_.push_back(std::make_unique<Process>(std::vector<std::string>{program, part},
                                                 Process::Environment{
                                                     {"RANK", std::to_string(rank)},
                                                     {"WORLD_SIZE", std::to_string(world)},
                                                     {"LOCAL_RANK", "0"},
                                                     {"LOCAL_WORLD_SIZE", "1"},
                                                     {"MASTER_ADDR", "127.0.0.1"},
                                                     {"MASTER_PORT", port},
                                                     {kStorePort, store_port},
                                                     {kFolder, (folder_ / "").string()},
                                                     {"NCCL_HOSTID", "rank" + std::to_string(rank)},
                                                     {"NCCL_SOCKET_IFNAME", "lo"},
                                                     {"NCCL_NET", "Socket"},
                                                     {"NCCL_IB_DISABLE", "1"},
                                                     {"NCCL_P2P_DISABLE", "1"},
                                                     {"NCCL_SHM_DISABLE", "1"},
                                                 }));
  }
  // Returns the exit code of a rank, or -1 after the limit, which counts from the constructor.
  int wait(int rank, std::chrono::seconds limit) {
    using std::chrono::seconds;
    const auto left = limit - std::chrono::duration_cast<seconds>(std::chrono::steady_clock::now() - began_);
    return ranks_[static_cast<size_t>(rank)]->wait(std::max(left, seconds(0)));
  }
  std::string output(int rank) const { return ranks_[static_cast<size_t>(rank)]->output(); }
  int size() const { return static_cast<int>(ranks_.size()); }

 private:
  using Process = testing_support::ChildProcess;
  const testing_support::TemporaryFolder folder_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<Process>> ranks_;
};

inline double seconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

inline std::string last_lines(const std::string& text) {
  return text.substr(text.size() - std::min<size_t>(text.size(), 600));
}

}  // namespace tessera::process_ranks
