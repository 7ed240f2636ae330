// Simulates power cuts, which lose any unsynced pages, files and names: the old state or the new one must remain.
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/checkpoint/file_calls.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/adam_moments.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::power_cut_test {
using namespace internal;
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

// A folder as it is on disk, and the changes since. A copy is a separate disk.
class Disk {
 public:
  // Its current content is durable.
  explicit Disk(fs::path root) : root_(std::move(root)) {
    nodes_.push_back({.is_folder = true});
    read(root_, 0);
  }

  void apply(const FileCall& call) {
    if (!fs::path(call.path).string().starts_with(root_.string())) return;
    switch (call.kind) {
      case FileCall::kCreate:
      case FileCall::kMakeFolder:
        nodes_.push_back({.is_folder = call.kind == FileCall::kMakeFolder});
        return change({{call.path, static_cast<int>(nodes_.size()) - 1}});
      case FileCall::kRemove:
        return change({{call.path, kNone}});
      case FileCall::kRename:
        return change({{call.path, kNone}, {call.to, node_of(call.path)}});
      case FileCall::kExchange:
        return change({{call.path, node_of(call.to)}, {call.to, node_of(call.path)}});
      case FileCall::kWrite:
        for (int64_t begin = 0; begin < static_cast<int64_t>(call.data.size());) {
          const int64_t position = call.position + begin;
          const int64_t page_end = (position / kPageBytes + 1) * kPageBytes - position;
          const auto part = call.data.substr(static_cast<size_t>(begin), static_cast<size_t>(page_end));
          nodes_.at(node_of(call.path)).pending.push_back({position, part});
          begin += page_end;
        }
        return;
      case FileCall::kResize:
        nodes_.at(node_of(call.path)).pending.push_back({call.position, std::nullopt});
        return;
      case FileCall::kSync:
        return sync(node_of(call.path));
    }
  }

  // Writes one possible state after a power cut.
  void write_what_is_left(const fs::path& to, uint64_t seed) const {
    std::mt19937_64 random(seed);
    // Sometimes keeps everything, or nothing.
    const uint64_t share = std::vector<uint64_t>{0, 1, 5, 9, 10}[random() % 5];
    auto is_lucky = [&] { return random() % 10 < share; };
    Disk left = *this;
    for (const auto& names : left.pending_names_)
      if (is_lucky()) left.make_durable(names);
    for (Node& node : left.nodes_)
      for (const auto& write : node.pending)
        if (is_lucky()) write.to(node.content);
    left.write(to, 0);
  }

 private:
  static constexpr int kNone = -1;
  static constexpr int64_t kPageBytes = 4096;

  struct Write {
    int64_t position;
    std::optional<std::string> data;  // none: sets the length
    void to(std::string& content) const {
      const size_t end = static_cast<size_t>(position) + (data ? data->size() : 0);
      if (!data || content.size() < end) content.resize(end);
      if (data) content.replace(static_cast<size_t>(position), data->size(), *data);
    }
  };
  struct Node {
    bool is_folder = false;
    std::string content;                              // of a file, on disk
    std::vector<Write> pending;                       // since the last sync
    std::map<std::string, int> names, durable_names;  // of a folder
  };
  struct Name {
    int folder;
    std::string name;
    int node;
  };
  using Names = std::vector<Name>;  // change atomically together

  void read(const fs::path& folder, int node) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      nodes_.push_back({.is_folder = entry.is_directory()});
      const int own = static_cast<int>(nodes_.size()) - 1;
      nodes_[node].names[entry.path().filename()] = nodes_[node].durable_names[entry.path().filename()] = own;
      if (entry.is_directory())
        read(entry.path(), own);
      else
        nodes_[own].content = file_bytes(entry.path());
    }
  }
  int node_of(const fs::path& path) const {
    int node = 0;
    for (const auto& name : path.lexically_relative(root_))
      if (name != ".") node = nodes_.at(node).names.at(name);
    return node;
  }
  void change(const std::vector<std::pair<fs::path, int>>& all) {
    Names names;
    for (const auto& [path, node] : all) names.push_back({node_of(path.parent_path()), path.filename(), node});
    for (const auto& [folder, name, node] : names) nodes_[folder].names[name] = node;
    pending_names_.push_back(names);
  }
  void make_durable(const Names& names) {
    for (const auto& [folder, name, node] : names) nodes_[folder].durable_names[name] = node;
  }
  void sync(int node) {
    for (const auto& write : nodes_[node].pending) write.to(nodes_[node].content);
    nodes_[node].pending.clear();
    std::erase_if(pending_names_, [&](const Names& names) {
      const bool is_here = names[0].folder == node;
      if (is_here) make_durable(names);
      return is_here;
    });
  }
  void write(const fs::path& folder, int node) const {
    fs::create_directories(folder);
    for (const auto& [name, own] : nodes_[node].durable_names) {
      if (own == kNone) continue;
      if (nodes_[own].is_folder)
        write(folder / name, own);
      else
        std::ofstream(folder / name, std::ios::binary) << nodes_[own].content;
    }
  }
  fs::path root_;
  std::vector<Node> nodes_;
  std::vector<Names> pending_names_;
};

struct Model {
  explicit Model(const std::shared_ptr<Communicator>& comm)
      : fsdp(torch::nn::Linear(48, 48), comm), adam(fsdp.parameters(), torch::optim::AdamOptions(0.1)) {}
  // Sets the parameters and their moments to `value`.
  void set(double value) {
    for (auto& shard : fsdp.parameters()) shard.mutable_grad() = torch::ones_like(shard);
    adam.step();
    for_each_shard_and_moment(fsdp.parameters(), adam, [&](const at::Tensor& tensor) { tensor.fill_(value); });
  }
  bool is(double value) {
    bool all = true;
    for_each_shard_and_moment(fsdp.parameters(), adam,
                              [&](const at::Tensor& tensor) { all = all && tensor.eq(value).all().item<bool>(); });
    return all;
  }
  FullyShardedDataParallel<torch::nn::Linear> fsdp;
  torch::optim::Adam adam;
};

using Save = std::function<void(const fs::path& folder, Model& model, int value)>;
// Returns the loaded state: 1 or 2, or 0 for anything else.
using Load = std::function<int(const fs::path& folder, Model& model)>;

// Saves 1 and then 2, cuts the power before, between and after the calls of the second save, and loads. Returns how
// often each state was found.
std::map<int, int> cut(const Save& save, const Load& load, bool syncs) {
  const TemporaryFolder folder;
  std::vector<FileCall> calls;
  std::optional<Disk> disk;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Model model(comm);
    model.set(1);
    save(folder.path(), model, 1);
    model.set(2);
    comm->barrier();
    if (comm->rank() == 0) {
      disk.emplace(folder.path());
      tell_file_calls([&](const FileCall& call) { calls.push_back(call); });
    }
    comm->barrier();
    save(folder.path(), model, 2);
    comm->barrier();
    if (comm->rank() == 0) tell_file_calls(nullptr);
  });
  std::map<int, int> seen;
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    Model model(comm);
    uint64_t seed = 0;
    for (size_t done = 0; done <= calls.size(); ++done) {
      const int rounds = done < calls.size() ? 4 : 40;  // the last call is often the rename
      for (int round = 0; round < rounds; ++round) {
        const TemporaryFolder after;
        disk->write_what_is_left(after.path(), ++seed);
        int result = 0;
        try {
          result = load(after.path(), model);
        } catch (const CheckpointError&) {
        }
        if (!model.is(result)) result = 0;
        ++seen[result];
        EXPECT_TRUE(result == 2 || !syncs || done < calls.size()) << "though it was saved";
      }
      if (done < calls.size() && (syncs || calls[done].kind != FileCall::kSync)) disk->apply(calls[done]);
    }
  });
  return seen;
}

void expect_old_or_new(const Save& save, const Load& load) {
  auto seen = cut(save, load, /*syncs=*/true);
  EXPECT_GT(seen[1], 0);
  EXPECT_GT(seen[2], 0);
  EXPECT_EQ(seen[0], 0);
  EXPECT_GT(cut(save, load, /*syncs=*/false)[0], 0) << "were there no sync";
}

TEST(PowerCut, LeavesTheOldCheckpointOrTheNewOne) {
  auto load = [](const fs::path& folder, Model& model) {
    const auto loaded = load_newest_checkpoint(folder, model.fsdp, model.adam);
    return loaded && loaded->damaged.empty() ? loaded->extra["value"].get<int>() : 0;
  };
  expect_old_or_new(
      [](const fs::path& folder, Model& model, int value) {
        save_checkpoint(folder / ("step-" + std::to_string(value)), model.fsdp, model.adam, {{"value", value}},
                        {.keep_last = 1});
        const auto before = folder / ("step-" + std::to_string(value - 1));
        for (int i = 0; i < 500 && fs::exists(before); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      },
      load);
  expect_old_or_new(  // replaced
      [](const fs::path& folder, Model& model, int value) {
        save_checkpoint_async(folder / "a", model.fsdp, model.adam, {{"value", value}}).wait();
      },
      load);
}

TEST(PowerCut, LeavesTheOldModelOrTheNewOne) {
  for (const int64_t max_file_bytes : {0, 5000})
    expect_old_or_new([=](const fs::path& folder, Model& model,
                          int) { save_full(folder / "m.safetensors", model.fsdp, {.max_file_bytes = max_file_bytes}); },
                      [](const fs::path& folder, Model& model) {
                        load_full(folder / "m.safetensors", model.fsdp);
                        return static_cast<int>(model.fsdp.parameters()[0].detach()[0].item<float>());
                      });
}

}  // namespace
}  // namespace tessera::power_cut_test
