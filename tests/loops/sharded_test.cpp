// Uses of a module whose parameters FullyShardedDataParallel has sharded.
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <sstream>

#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

// Sanitizers keep freed memory, and records of it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

TESSERA_LOOPS(Sharded, fsdp_setups);

// Runs a body that has no counterpart in one process.
void on_ranks_of(const Setup& setup, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  InitOptions options;
  options.timeout = std::chrono::seconds(20);
  for (int world : worlds_of(setup)) {
    run_ranks(
        world,
        [&](std::shared_ptr<Communicator> comm) {
          at::set_num_threads(1);
          body(comm);
        },
        options);
  }
}
void on_ranks_of(const Setup& setup, const std::function<void(Trainer&)>& body) {
  on_ranks_of(setup, [&](std::shared_ptr<Communicator> comm) {
    auto run = setup.make(mlp(), comm, Optim::kAdam, {});
    body(*run);
  });
}

// ---- optimizers of the wrong parameters

// One letter a call: z zero_grad, b forward and backward, s step.
TEST_P(Sharded, AnOptimizerBuiltBeforeWrappingIsRefusedAtItsStep) {
  for (const std::string order : {"bs", "zbs", "sbs", "zbzbs"}) {
    for (bool is_adam : {false, true}) {
      on_ranks_of(GetParam(), [&](std::shared_ptr<Communicator> comm) {
        Model model = mlp();
        std::unique_ptr<torch::optim::Optimizer> early;
        if (is_adam)
          early = std::make_unique<torch::optim::Adam>(model->parameters());
        else
          early = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
        auto run = GetParam().make(model, comm, Optim::kSgd, {});
        const std::string error = error_of<std::exception>([&] {
          int step = 0;
          for (char call : order) {
            if (call == 'z') early->zero_grad();
            if (call == 'b') run->loss(step++).backward();
            if (call == 's') early->step();
          }
        });
        for (const char* part : {"parameter 'fc", " on rank "})
          EXPECT_NE(error.find(part), std::string::npos)
              << error << " world " << comm->size() << " order " << order << (is_adam ? " Adam" : " SGD");
      });
    }
  }
}

TEST_P(Sharded, OssOverAShardedModuleIsRefused) {
  for (bool of_wrapper : {false, true}) {
    on_ranks_of(GetParam(), [of_wrapper](Trainer& run) {
      const auto parameters = of_wrapper ? run.parameters() : run.model->parameters();
      const std::string error = error_of<std::exception>(
          [&] { OSS<torch::optim::Adam> optimizer(parameters, torch::optim::AdamOptions(1e-2), run.fsdp()->comm()); });
      EXPECT_NE(error, "") << "world " << run.world << ", of the " << (of_wrapper ? "wrapper's" : "module's")
                           << " parameters";
    });
  }
}

TEST_P(Sharded, OtherWrappersAroundAShardedModuleAreRefused) {
  for (bool resident : {false, true}) {
    on_ranks_of(GetParam(), [resident](Trainer& run) {
      at::Tensor loss;
      if (resident) loss = run.loss(0);
      auto free = seeded(3, [] { return torch::nn::Linear(2, 2); });
      EXPECT_NE(error_of<std::exception>([&] { DistributedDataParallel(run.model, run.fsdp()->comm()); }), "")
          << "world " << run.world << (resident ? ", resident" : "");
      OSS<torch::optim::SGD> optimizer(free->parameters(), torch::optim::SGDOptions(0.1), run.fsdp()->comm());
      EXPECT_NE(error_of<std::exception>([&] { ShardedDataParallel(run.model, optimizer, run.fsdp()->comm()); }), "")
          << "world " << run.world << (resident ? ", resident" : "");
      EXPECT_NE(error_of<std::exception>([&] { FullyShardedDataParallel(run.model, run.fsdp()->comm()); }), "")
          << "world " << run.world << (resident ? ", resident" : "");
      if (loss.defined()) loss.backward();
      run.train(1);
    });
  }
}

// ---- torch::save

TEST_P(Sharded, SavingTheModuleIsRefused) {
  play(GetParam(),
       {.expect = Expect::kRefused,
        .says = {"torch::save of a parameter of "},
        .equal_alone = true,
        .optimizers = {Optim::kAdam}},
       [](Trainer& run) {
         run.train(0);
         std::ostringstream file;
         torch::save(run.model, file);
       });
}

TEST_P(Sharded, SavingTheModuleInsideSummonFullParams) {
  play(GetParam(), {.optimizers = {Optim::kAdam}}, [](Trainer& run) {
    run.train(0);
    std::ostringstream file;
    {
      auto scope = run.fsdp() != nullptr ? run.fsdp()->summon_full_params() : ScopeExit([] {});
      torch::save(run.model, file);
    }
    Model loaded = another_mlp();
    std::istringstream back(file.str());
    torch::load(loaded, back);
    for (const auto& parameter : loaded->parameters()) run.note(parameter.square().sum());
    run.train(1);
  });
}

// ---- visit_full_state

TEST_P(Sharded, AVisitorThatThrowsLeavesNothingGathered) {
  play(GetParam(), {.optimizers = {Optim::kAdam}}, [](Trainer& run) {
    run.train(0);
    if (run.fsdp() != nullptr) {
      const int64_t before = run.fsdp()->memory().gathered_bytes;
      EXPECT_EQ(error_of<std::runtime_error>([&] {
                  run.fsdp()->visit_full_state([&](const std::string& name, const at::Tensor&) {
                    if (name == "fc2.weight") throw std::runtime_error("enough");
                  });
                }),
                "enough");
      EXPECT_EQ(run.fsdp()->memory().gathered_bytes, before);
    }
    for (int step = 1; step < 3; ++step) run.train(step);
  });
}

// ---- summon_full_params

ScopeExit summon(Trainer& run, SummonOptions options = {}) {
  return run.fsdp() != nullptr ? run.fsdp()->summon_full_params(std::move(options)) : ScopeExit([] {});
}

TEST_P(Sharded, ValuesChangedInsideSummonFullParams) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      auto scope = summon(run);
      torch::NoGradGuard no_grad;
      for (const auto& parameter : run.model->parameters()) parameter.mul_(0.9);
    }
  });
}

TEST_P(Sharded, WithoutWritebackNothingChanges) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      if (run.fsdp() == nullptr) continue;
      auto scope = summon(run, {.writeback = false});
      torch::NoGradGuard no_grad;
      for (const auto& parameter : run.model->parameters()) parameter.mul_(0.5);
      for (const auto& parameter : run.model->parameters()) parameter.data().add_(1);
    }
  });
}

TEST_P(Sharded, FullStateInsideSummonSeesWhatIsThere) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    {
      auto scope = summon(run);
      torch::NoGradGuard no_grad;
      for (const auto& parameter : run.model->parameters()) parameter.mul_(0.5);
      for (const auto& entry : run.state()) run.note(entry.value().square().sum());
    }
    run.train(1);
  });
}

TEST_P(Sharded, StepInsideSummonFullParams) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    run.loss(1).backward();
    {
      auto scope = summon(run);
      run.optimizer().step();
    }
    run.train(2);
  });
}

TEST_P(Sharded, ForwardAndBackwardInsideSummonFullParams) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    {
      auto scope = summon(run);
      run.loss(1).backward();
    }
    run.optimizer().step();
    run.train(2);
  });
}

// In a world of one, full parameters may share the shards' memory.
TEST_P(Sharded, ALookWithoutWritebackBeforeBackward) {
  auto alone = GetParam();
  if (alone.worlds.front() == 1) alone.worlds = {1};
  for (const auto& setup : {alone, GetParam()}) {
    play(setup, {}, [](Trainer& run) {
      for (int step = 0; step < 3; ++step) {
        run.optimizer().zero_grad();
        const at::Tensor loss = run.loss(step);
        if (run.fsdp() != nullptr) run.fsdp()->summon_full_params({.writeback = false}).leave();
        loss.backward();
        run.optimizer().step();
      }
    });
  }
}

TEST_P(Sharded, AloneWithoutWriteback) {
  auto alone = GetParam();
  if (alone.worlds.front() != 1) return;  // needs more ranks
  alone.worlds = {1};
  for (bool changes : {false, true}) {
    play(alone, {.expect = Expect::kEither}, [changes](Trainer& run) {
      for (int step = 0; step < 3; ++step) {
        run.optimizer().zero_grad();
        run.loss(step).backward();
        {
          auto scope = summon(run, {.writeback = false});
          if (changes && run.fsdp() != nullptr) {
            const torch::NoGradGuard no_grad;
            for (const auto& parameter : run.model->parameters()) parameter.mul_(0.5).data().add_(1);
          }
          const auto state = run.state();
          if (!changes) run.note(state["fc2.weight"].sum());
          if (!changes) run.optimizer().step();
        }
        if (changes) run.optimizer().step();
      }
    });
  }
}

// ---- on_gradients

TEST_P(Sharded, AnObserverLooksAtMemoryAndAtParameters) {
  if (GetParam().name == "fsdp_ahead") return;  // it checks gradients, which is refused with observers
  play(GetParam(), {.expect = Expect::kEither, .optimizers = {Optim::kAdam}}, [](Trainer& run) {
    auto observed = std::make_shared<int>(0);
    std::optional<ScopeExit> scope;
    if (run.fsdp() != nullptr)
      scope.emplace(run.fsdp()->on_gradients([&run, observed](const std::vector<at::Tensor>& leaves) {
        const torch::NoGradGuard no_grad;
        *observed += static_cast<int>(leaves.size());
        EXPECT_GE(run.fsdp()->memory().gathered_bytes, 0);
        mlp_of(*run.model).fc1->weight.square().sum();
      }));
    for (int step = 0; step < 3; ++step) run.train(step);
    if (run.fsdp() != nullptr) {
      EXPECT_EQ(*observed, 3 * static_cast<int>(run.parameters().size()));
    }
  });
}

// ---- memory

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST_P(Sharded, EvaluationThroughTheModuleAloneTakesNoMoreMemory) {
  on_ranks_of(GetParam(), [](Trainer& run) {
    if (run.world % 2 != 0) return;  // one world is enough for so many passes
    run.train(0);
    torch::NoGradGuard no_grad;
    auto evaluate = [&](int times) {
      for (int i = 0; i < times; ++i) run.model->forward(run.x(0));
    };
    evaluate(200);
    run.fsdp()->comm()->barrier();
    const int64_t gathered = run.fsdp()->memory().gathered_bytes, resident = resident_bytes();
    evaluate(kIsSanitized ? 200 : 1800);
    run.fsdp()->comm()->barrier();
    EXPECT_LE(run.fsdp()->memory().gathered_bytes, gathered);
    if (!kIsSanitized) {
      EXPECT_LE(resident_bytes() - resident, int64_t{8} << 20);
    }
  });
}

}  // namespace
}  // namespace tessera::loops
