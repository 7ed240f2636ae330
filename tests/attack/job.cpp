// The job that attack.py attacks, and the reader of files that it damages.
//
//   attack_job train FOLDER SAVES
//     One rank, in a launcher's environment: resumes from the newest checkpoint of a folder, and saves SAVES times.
//   attack_job spawn RANKS FOLDER SAVES
//     The same, by spawn_local().
//   attack_job make FOLDER
//     Writes sound files of all formats, for damage.
//   attack_job read
//     Answers each line "<format> <path>" of stdin by "values <hash> <value> <rest>" or "refused <error>".
//
// Ranks print "loaded <value>", "saved <value>" and "refused <error>" of a failed save. All tensors of a checkpoint of
// `train`, optimizer state included, have the value of its last save. Exit code 3: a loaded checkpoint has other
// values; 1: an error, printed.

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/exported.h>
#include <tessera/tessera.h>
#include "checkpoint/format/checksum.h"
#include "tests/support/adam_moments.h"

namespace {

namespace fs = std::filesystem;
using Comm = std::shared_ptr<tessera::Communicator>;

class WrongValues : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A model with Adam.
struct Trained {
  explicit Trained(Comm comm)
      : fsdp(
            [] {
              torch::manual_seed(1);
              return torch::nn::Sequential(torch::nn::Linear(40, 40), torch::nn::Linear(40, 40));
            }(),
            std::move(comm)),
        adam(fsdp.parameters(), torch::optim::AdamOptions(0.1)) {}

  void step() {
    for (auto& shard : fsdp.parameters()) shard.mutable_grad() = torch::ones_like(shard);
    adam.step();
  }

  void for_each_tensor(const std::function<void(const at::Tensor&)>& visit) {
    tessera::testing_support::for_each_shard_and_moment(fsdp.parameters(), adam, visit);
  }

  void expect_all(int value) {
    for_each_tensor([&](const at::Tensor& tensor) {
      if (!tensor.eq(value).all().item<bool>())
        throw WrongValues("the checkpoint of " + std::to_string(value) + " has other values");
    });
  }

  tessera::FullyShardedDataParallel<torch::nn::Sequential> fsdp;
  torch::optim::Adam adam;
};

void train(const fs::path& folder, int saves) {
  at::set_num_threads(1);
  const char* timeout = std::getenv("TESSERA_ATTACK_TIMEOUT_MS");
  const Comm comm =
      tessera::init({.timeout = std::chrono::milliseconds(timeout == nullptr ? 5000 : std::atoi(timeout))});
  const auto say = [&](const std::string& text) {
    if (comm->rank() == 0) std::cout << text << std::endl;
  };
  Trained trained(comm);
  const auto loaded = tessera::load_newest_checkpoint(folder, trained.fsdp, trained.adam);
  int value = loaded ? loaded->extra["value"].get<int>() : 0;
  if (loaded) trained.expect_all(value);
  say("loaded " + std::to_string(value));
  for (const int end = value + saves; value < end;) {
    const at::NoGradGuard no_grad;
    ++value;
    trained.step();
    trained.for_each_tensor([&](const at::Tensor& tensor) { tensor.fill_(value); });
    const auto name = folder / ("step-" + std::to_string(value % 5));
    try {
      if (value % 2 == 0) {
        tessera::save_checkpoint(name, trained.fsdp, trained.adam, {{"value", value}}, {.keep_last = 2});
      } else {
        tessera::save_checkpoint_async(name, trained.fsdp, trained.adam, {{"value", value}}, {.keep_last = 2}).wait();
      }
      say("saved " + std::to_string(value));
    } catch (const tessera::CheckpointError& error) {
      say(std::string("refused ") + error.what());
    }
  }
}

// ---- files --------------------------------------------------------------------------------------

void make(const fs::path& folder) {
  for (const char* name : {"checkpoints", "full", "parts"}) fs::create_directories(folder / name);
  tessera::run_ranks(2, [&](Comm comm) {
    Trained trained(comm);
    for (int value = 1; value <= 2; ++value) {
      trained.step();
      tessera::save_checkpoint(folder / "checkpoints" / std::to_string(value), trained.fsdp, trained.adam,
                               {{"value", value}});
    }
    tessera::save_full(folder / "full/model.safetensors", trained.fsdp);
    tessera::save_full(folder / "parts/model.safetensors", trained.fsdp, {.max_file_bytes = 7000});
  });
}

void add(std::string& all, const at::Tensor& tensor) {
  const at::Tensor own = tensor.contiguous();
  all += own.toString() + std::to_string(own.dim()) + " ";
  all.append(static_cast<const char*>(own.const_data_ptr()), own.nbytes());
}

struct Values {
  std::string all;   // the bytes of all tensors
  std::string rest;  // the value of the loaded checkpoint, and the errors of damaged ones
};

Values read_sharded(const std::string& format, const fs::path& path) {
  Values values;
  tessera::run_ranks(1, [&](Comm comm) {
    Trained trained(comm);
    if (format == "full") {
      tessera::load_full(path, trained.fsdp);
    } else if (format == "checkpoint") {
      values.rest = tessera::load_checkpoint(path, trained.fsdp, trained.adam).dump();
    } else {
      const auto loaded = tessera::load_newest_checkpoint(path, trained.fsdp, trained.adam);
      if (!loaded) throw tessera::CheckpointError(path.string() + ": has no checkpoint");
      values.rest = loaded->extra.dump();
      for (const auto& error : loaded->damaged) values.rest += " passed over: " + error;
      if (format == "trained") trained.expect_all(loaded->extra["value"].get<int>());
    }
    trained.for_each_tensor([&](const at::Tensor& tensor) { add(values.all, tensor); });
  });
  return values;
}

Values read_exported(const fs::path& path) {
  const auto model = tessera::load_exported(path);
  Values values;
  for (const auto& item : model->named_parameters()) values.all += item.key(), add(values.all, item.value());
  for (const auto& item : model->named_buffers()) values.all += item.key(), add(values.all, item.value());
  return values;
}

std::string answer(const std::string& format, const fs::path& path) {
  try {
    const Values values = format == "exported" ? read_exported(path) : read_sharded(format, path);
    return "values " + tessera::internal::to_hex(tessera::internal::checksum(values.all)) + " " + values.rest;
  } catch (const tessera::CheckpointError& error) {
    return std::string("refused ") + error.what();
  } catch (const tessera::ExportedError& error) {
    return std::string("refused ") + error.what();
  } catch (const std::exception& error) {  // readers must not answer damage by other errors
    return std::string("wrong ") + error.what();
  }
}

void read_files() {
  at::set_num_threads(1);
  for (std::string format, path; std::cin >> format && std::getline(std::cin >> std::ws, path);) {
    std::string line = answer(format, path);
    for (char& letter : line)
      if (letter == '\n') letter = ' ';
    std::cout << line << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string mode = words.empty() ? "" : words[0];
  try {
    if (mode == "spawn" && words.size() == 4 && !tessera::launched())
      return tessera::spawn_local(std::stoi(words[1]), argc, argv);
    if (mode == "spawn" && words.size() == 4) return train(words[2], std::stoi(words[3])), 0;
    if (mode == "train" && words.size() == 3) return train(words[1], std::stoi(words[2])), 0;
    if (mode == "make" && words.size() == 2) return make(words[1]), 0;
    if (mode == "read") return read_files(), 0;
    std::cerr << "attack_job: see the first lines of its source\n";
    return 2;
  } catch (const WrongValues& error) {
    std::cerr << "attack_job: " << error.what() << "\n";
    return 3;
  } catch (const std::exception& error) {
    std::cerr << "attack_job: " << error.what() << "\n";
    return 1;
  }
}
