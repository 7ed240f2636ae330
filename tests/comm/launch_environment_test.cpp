#include "core/launch/launch_environment.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/launch/device_choice.h"

namespace tessera::launch_environment_test {
using namespace internal;
namespace {

using Environment = std::map<std::string, std::string>;

LaunchEnvironment parse(const Environment& variables) {
  return parse_launch_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

// Returns the error's text; fails the test if there is no error.
std::string error_of(const Environment& variables) {
  try {
    const auto environment = parse(variables);
    ADD_FAILURE() << "expected an error, got rank " << environment.rank << " of " << environment.world_size;
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

void expect_error(const Environment& variables, const std::vector<std::string>& parts) {
  const auto text = error_of(variables);
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

Environment with(Environment base, const Environment& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

Environment without(Environment base, const std::string& name) {
  base.erase(name);
  return base;
}

const Environment kTorchrun = {{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "10.0.0.1"},
                               {"MASTER_PORT", "29500"}};
const Environment kSlurm = {{"SLURM_PROCID", "5"},
                            {"SLURM_NTASKS", "8"},
                            {"SLURM_LOCALID", "1"},
                            {"SLURM_NODEID", "1"},
                            {"SLURM_STEP_ID", "0"},
                            {"SLURM_STEP_NUM_TASKS", "8"},
                            {"SLURM_JOB_ID", "4711"},
                            {"SLURM_STEP_NODELIST", "node[07-08]"},
                            {"SLURM_JOB_NODELIST", "node[07-08]"},
                            {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                            {"SLURM_SUBMIT_DIR", "/home/u"}};
const Environment kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                              {"OMPI_COMM_WORLD_SIZE", "3"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                              {"OMPI_MCA_ess_base_jobid", "2142765057"}};

TEST(LaunchEnvironment, NothingSetIsAWorldOfOne) {
  const auto environment = parse({{"PATH", "/bin"}});
  EXPECT_FALSE(environment.launched());
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.world_size, 1);
  EXPECT_EQ(environment.local_rank, 0);
  EXPECT_TRUE(environment.one_host());
  EXPECT_EQ(environment.note, "");
}

TEST(LaunchEnvironment, Torchrun) {
  const auto environment = parse(with(
      kTorchrun,
      {{"TORCHELASTIC_RUN_ID", "run"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_EQ(environment.launcher, "torchrun");
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.world_size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 4);
  EXPECT_EQ(environment.master_address, "10.0.0.1");
  EXPECT_EQ(environment.master_port, 29500);
  EXPECT_FALSE(environment.one_host());
  EXPECT_TRUE(environment.agent_serves_store);
  EXPECT_EQ(environment.restart_count, 2);
  EXPECT_EQ(environment.job, "run");
  EXPECT_FALSE(parse(kTorchrun).agent_serves_store);
}

TEST(LaunchEnvironment, OnlyTorchrunsOwnRanksAreNamedAfterIt) {
  EXPECT_EQ(parse(kTorchrun).launcher, "RANK and WORLD_SIZE");
  EXPECT_EQ(parse(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).launcher, "spawn_local");
}

TEST(LaunchEnvironment, TorchrunOfOneRankNeedsNoAddressAndIsLaunched) {
  const auto environment = parse({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_TRUE(environment.launched());
  EXPECT_TRUE(environment.one_host());
  EXPECT_EQ(environment.local_rank, 0);
}

TEST(LaunchEnvironment, TorchrunWithoutLocalVariables) {
  const Environment bare = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "1234"}};
  const auto elsewhere = parse(bare);
  EXPECT_EQ(elsewhere.local_rank, -1) << "not said";
  EXPECT_EQ(elsewhere.local_world_size, 0) << "not said";
  EXPECT_FALSE(elsewhere.one_host());
  for (const char* loopback : {"127.0.0.1", "localhost", "::1"}) {
    const auto here = parse(with(bare, {{"MASTER_ADDR", loopback}}));
    EXPECT_EQ(here.local_rank, 1) << loopback;
    EXPECT_TRUE(here.one_host()) << loopback;
  }
}

TEST(LaunchEnvironment, TorchrunTwoAgentsOnOneMachineKeepTheirLocalRanks) {
  const auto environment = parse(with(kTorchrun, {{"MASTER_ADDR", "127.0.0.1"}}));
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 4);
}

TEST(LaunchEnvironment, TorchrunHalfSetNamesAll) {
  expect_error({{"RANK", "1"}},
               {"half set", "RANK=1", "WORLD_SIZE is not set", "MASTER_ADDR is not set", "MASTER_PORT is not set"});
  expect_error({{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}}, {"RANK is not set", "WORLD_SIZE=2", "MASTER_ADDR=h"});
  expect_error(without(kTorchrun, "MASTER_ADDR"),
               {"RANK=5", "WORLD_SIZE=8", "MASTER_ADDR is not set", "MASTER_PORT=29500"});
  expect_error(without(kTorchrun, "MASTER_PORT"), {"MASTER_ADDR=10.0.0.1", "MASTER_PORT is not set"});
  expect_error(with(kTorchrun, {{"MASTER_ADDR", ""}}), {"MASTER_ADDR is not set"});
  expect_error({{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}},
               {"RANK is not set", "WORLD_SIZE is not set", "MASTER_ADDR=h"});
}

TEST(LaunchEnvironment, TorchrunBadValues) {
  expect_error(with(kTorchrun, {{"RANK", "x"}}), {"RANK=x", "whole number"});
  expect_error(with(kTorchrun, {{"RANK", "1.5"}}), {"RANK=1.5"});
  expect_error(with(kTorchrun, {{"RANK", " 1"}}), {"RANK= 1"});
  expect_error(with(kTorchrun, {{"RANK", "-1"}}), {"RANK=-1", "from 0"});
  expect_error(with(kTorchrun, {{"RANK", "8"}}), {"RANK=8", "WORLD_SIZE=8", "below"});
  expect_error(with(kTorchrun, {{"RANK", "99999999999999999999"}}), {"RANK=99999999999999999999"});
  expect_error(with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0", "from 1"});
  expect_error(with(kTorchrun, {{"LOCAL_RANK", "4"}}), {"LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4", "below"});
  expect_error(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), {"LOCAL_WORLD_SIZE=9", "from 1 to 8"});
  expect_error(with(kTorchrun, {{"MASTER_ADDR", "[::1]"}}), {"MASTER_ADDR=[::1]", "without brackets"});
  expect_error(with(kTorchrun, {{"MASTER_PORT", "0"}}), {"MASTER_PORT=0"});
  expect_error(with(kTorchrun, {{"MASTER_PORT", "65536"}}), {"MASTER_PORT=65536", "65535"});
  expect_error(with(kTorchrun, {{"MASTER_PORT", "http"}}), {"MASTER_PORT=http"});
  expect_error(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "often"}}), {"TORCHELASTIC_RESTART_COUNT=often"});
}

TEST(LaunchEnvironment, Slurm) {
  const auto environment = parse(kSlurm);
  EXPECT_EQ(environment.launcher, "Slurm");
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.world_size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 4);
  EXPECT_EQ(environment.master_address, "node07");
  EXPECT_EQ(environment.job, "4711.0");
  EXPECT_EQ(environment.master_port, derived_port("4711.0"));
  EXPECT_EQ(environment.note, "");
}

TEST(LaunchEnvironment, SlurmPortsDifferByJobAndStep) {
  EXPECT_NE(parse(kSlurm).master_port, parse(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).master_port);
  EXPECT_NE(parse(kSlurm).master_port, parse(with(kSlurm, {{"SLURM_JOB_ID", "4712"}})).master_port);
}

TEST(LaunchEnvironment, SlurmTakesMasterFromTheEnvironment) {
  const auto environment = parse(with(kSlurm, {{"MASTER_ADDR", "login1"}, {"MASTER_PORT", "4242"}}));
  EXPECT_EQ(environment.master_address, "login1");
  EXPECT_EQ(environment.master_port, 4242);
}

TEST(LaunchEnvironment, SlurmRankZeroOnAnotherNode) {  // srun --distribution=arbitrary
  const Environment first = with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}});
  expect_error(first, {"rank 0", "node[07-08]", "SLURM_NODEID=1", "MASTER_ADDR is not set"});
  EXPECT_EQ(parse(with(first, {{"MASTER_ADDR", "node08"}})).master_address, "node08");
  EXPECT_EQ(parse(with(first, {{"SLURM_NODEID", "0"}})).master_address, "node07");
}

TEST(LaunchEnvironment, SlurmSetByHandOnOneHost) {
  const auto environment = parse({{"SLURM_PROCID", "1"},
                                  {"SLURM_NTASKS", "3"},
                                  {"SLURM_LOCALID", "1"},
                                  {"SLURM_JOB_ID", "7"},
                                  {"SLURM_JOB_NODELIST", "nowhere"}});
  EXPECT_EQ(environment.launcher, "Slurm");
  EXPECT_TRUE(environment.one_host());
  EXPECT_EQ(environment.master_address, "127.0.0.1") << "one host needs no name";
  const auto per_node =
      parse({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}, {"SLURM_NTASKS_PER_NODE", "3"}, {"SLURM_JOB_ID", "7"}});
  EXPECT_TRUE(per_node.one_host());
  EXPECT_EQ(per_node.local_rank, 0);
}

TEST(LaunchEnvironment, SlurmStepSmallerThanItsJob) {
  const auto environment = parse(with(kSlurm, {{"SLURM_PROCID", "1"},
                                               {"SLURM_STEP_NUM_TASKS", "2"},
                                               {"SLURM_STEP_NODELIST", "node08"},
                                               {"SLURM_STEP_TASKS_PER_NODE", "2"}}));
  EXPECT_EQ(environment.world_size, 2);
  EXPECT_TRUE(environment.one_host());
}

TEST(LaunchEnvironment, SlurmUnevenNodes) {
  const Environment uneven =
      with(kSlurm, {{"SLURM_NTASKS", "7"}, {"SLURM_STEP_NUM_TASKS", "7"}, {"SLURM_STEP_TASKS_PER_NODE", "4,3"}});
  EXPECT_EQ(parse(uneven).local_world_size, 3);
  EXPECT_EQ(parse(with(uneven, {{"SLURM_NODEID", "0"}})).local_world_size, 4);
  EXPECT_EQ(parse(without(uneven, "SLURM_NODEID")).local_world_size, 0) << "not said";
}

TEST(LaunchEnvironment, SlurmBatchScriptAndShellAreAWorldOfOne) {
  // sbatch's script is process 0 of the job's batch step; no task was started.
  const Environment script = {{"SLURM_PROCID", "0"},
                              {"SLURM_LOCALID", "0"},
                              {"SLURM_NTASKS", "8"},
                              {"SLURM_JOB_ID", "4711"},
                              {"SLURM_JOB_NODELIST", "node[07-08]"},
                              {"SLURM_SUBMIT_DIR", "/home/u"}};
  for (const auto& variables : {script, without(script, "SLURM_PROCID"), with(script, {{"MASTER_PORT", "4000"}})}) {
    const auto environment = parse(variables);
    EXPECT_FALSE(environment.launched());
    EXPECT_EQ(environment.world_size, 1);
    EXPECT_NE(environment.note.find("SLURM_NTASKS=8"), std::string::npos) << environment.note;
    EXPECT_NE(environment.note.find("srun"), std::string::npos);
  }
  EXPECT_EQ(parse(with(script, {{"SLURM_NTASKS", "1"}})).note, "");
}

TEST(LaunchEnvironment, SlurmStepOfOneTaskIsNoLauncher) {
  // srun --pty bash: a program in that shell may start local ranks.
  const auto environment = parse({{"SLURM_PROCID", "0"},
                                  {"SLURM_NTASKS", "1"},
                                  {"SLURM_STEP_ID", "0"},
                                  {"SLURM_STEP_NUM_TASKS", "1"},
                                  {"SLURM_JOB_ID", "1"},
                                  {"SLURM_SUBMIT_DIR", "/"}});
  EXPECT_FALSE(environment.launched());
}

TEST(LaunchEnvironment, SlurmHalfSetOrBad) {
  expect_error({{"SLURM_PROCID", "1"}}, {"Slurm", "half set", "SLURM_PROCID=1", "SLURM_NTASKS is not set"});
  expect_error({{"SLURM_NTASKS", "2"}}, {"SLURM_PROCID is not set", "SLURM_NTASKS=2"});
  expect_error({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_NTASKS_PER_NODE", "2"}},
               {"SLURM_JOB_ID is not set", "MASTER_PORT is not set"});
  expect_error({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "3"}},
               {"SLURM_STEP_NODELIST is not set", "MASTER_ADDR is not set"});
  expect_error(with(kSlurm, {{"SLURM_PROCID", "8"}}), {"SLURM_PROCID=8", "SLURM_STEP_NUM_TASKS=8"});
  expect_error(with(kSlurm, {{"SLURM_PROCID", "one"}}), {"SLURM_PROCID=one"});
  expect_error(with(kSlurm, {{"SLURM_STEP_NODELIST", "node[07-"}}), {"node[07-"});
}

TEST(LaunchEnvironment, OpenMpiOnOneHost) {
  const auto environment = parse(kOpenMpi);
  EXPECT_EQ(environment.launcher, "Open MPI");
  EXPECT_EQ(environment.rank, 2);
  EXPECT_EQ(environment.world_size, 3);
  EXPECT_EQ(environment.local_rank, 2);
  EXPECT_TRUE(environment.one_host());
  EXPECT_EQ(environment.master_address, "127.0.0.1");
  EXPECT_EQ(environment.master_port, derived_port("2142765057"));
  const auto version5 =
      parse(with(without(kOpenMpi, "OMPI_MCA_ess_base_jobid"), {{"PMIX_NAMESPACE", "prterun-vm-88@1"}}));
  EXPECT_EQ(version5.master_port, derived_port("prterun-vm-88@1"));
}

TEST(LaunchEnvironment, OpenMpiOnSeveralHostsNeedsAnAddress) {
  const Environment two_hosts =
      with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  expect_error(two_hosts,
               {"several hosts", "OMPI_COMM_WORLD_SIZE=3", "OMPI_COMM_WORLD_LOCAL_SIZE=2", "MASTER_ADDR is not set"});
  EXPECT_EQ(parse(with(two_hosts, {{"MASTER_ADDR", "node1"}})).master_address, "node1");
}

TEST(LaunchEnvironment, OpenMpiHalfSetOrBad) {
  expect_error({{"OMPI_COMM_WORLD_RANK", "0"}}, {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not set"});
  expect_error(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "3"}}), {"OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=3"});
  expect_error(without(kOpenMpi, "OMPI_MCA_ess_base_jobid"), {"PMIX_NAMESPACE is not set", "MASTER_PORT is not set"});
  EXPECT_EQ(parse(with(without(kOpenMpi, "OMPI_MCA_ess_base_jobid"), {{"MASTER_PORT", "9"}})).master_port, 9);
}

TEST(LaunchEnvironment, OpenMpiOfOneRankIsNoLauncher) {
  EXPECT_FALSE(parse({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}).launched());
}

struct OtherLauncher {
  const char* name;
  Environment variables;  // of rank 1 of 3 on one host
  const char* job;
};

const OtherLauncher kOtherLaunchers[] = {
    {"MPICH or Intel MPI",
     {{"PMI_RANK", "1"},
      {"PMI_SIZE", "3"},
      {"MPI_LOCALRANKID", "1"},
      {"MPI_LOCALNRANKS", "3"},
      {"PMI_PORT", "vm:4711"}},
     "vm:4711"},
    {"MVAPICH2",
     {{"MV2_COMM_WORLD_RANK", "1"},
      {"MV2_COMM_WORLD_SIZE", "3"},
      {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
      {"MV2_COMM_WORLD_LOCAL_SIZE", "3"},
      {"MPIRUN_ID", "4711"},
      {"PMI_RANK", "1"},
      {"PMI_SIZE", "3"}},
     "4711"},
    {"JSM",
     {{"JSM_NAMESPACE_RANK", "1"},
      {"JSM_NAMESPACE_SIZE", "3"},
      {"JSM_NAMESPACE_LOCAL_RANK", "1"},
      {"JSM_NAMESPACE_LOCAL_SIZE", "3"},
      {"PMIX_RANK", "1"},
      {"PMIX_NAMESPACE", "1.2"}},
     "1.2"},
    {"Flux",
     {{"FLUX_TASK_RANK", "1"},
      {"FLUX_JOB_SIZE", "3"},
      {"FLUX_TASK_LOCAL_ID", "1"},
      {"FLUX_JOB_NNODES", "1"},
      {"FLUX_JOB_ID", "f2A"},
      {"PMI_RANK", "1"},
      {"PMI_SIZE", "3"}},
     "f2A"},
    {"Cray PALS",
     {{"PALS_RANKID", "1"},
      {"PMI_RANK", "1"},
      {"PMI_SIZE", "3"},
      {"PALS_LOCAL_RANKID", "1"},
      {"PALS_LOCAL_SIZE", "3"},
      {"PALS_APID", "a-b"}},
     "a-b"},
    {"PMIx",
     {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "prterun-7"}, {"WORLD_SIZE", "3"}, {"LOCAL_WORLD_SIZE", "3"}},
     "prterun-7"},
};

TEST(LaunchEnvironment, OtherLaunchersOnOneHost) {
  for (const auto& [name, variables, job] : kOtherLaunchers) {
    SCOPED_TRACE(name);
    const auto environment = parse(variables);
    EXPECT_EQ(environment.launcher, name);
    EXPECT_EQ(environment.rank, 1);
    EXPECT_EQ(environment.world_size, 3);
    EXPECT_EQ(environment.local_rank, 1);
    EXPECT_TRUE(environment.one_host());
    EXPECT_EQ(environment.master_address, "127.0.0.1");
    EXPECT_EQ(environment.job, job);
    EXPECT_EQ(environment.master_port, derived_port(job));
    EXPECT_EQ(parse(with(variables, {{"MASTER_ADDR", "host0"}, {"MASTER_PORT", "9"}})).master_address, "host0");
  }
  expect_error(with(kOtherLaunchers[0].variables, {{"RANK", "0"}, {"WORLD_SIZE", "2"}}),
               {"RANK=0, WORLD_SIZE=2, but MPICH or Intel MPI's PMI_RANK=1, PMI_SIZE=3"});
}

TEST(LaunchEnvironment, OtherLaunchersWithoutSizeOrAddressSayWhatToSet) {
  expect_error({{"PMIX_RANK", "1"}}, {"PMIx has started this process", "PMIX_RANK=1", "set WORLD_SIZE", "MASTER_ADDR"});
  expect_error({{"PALS_RANKID", "1"}}, {"Cray PALS", "PALS_RANKID=1, PMI_SIZE is not set", "set WORLD_SIZE"});
  expect_error({{"PMI_RANK", "0"}}, {"MPICH or Intel MPI", "PMI_SIZE is not set", "set WORLD_SIZE"});
  expect_error({{"PMI_SIZE", "2"}}, {"PMI_RANK is not set, PMI_SIZE=2"});
  for (const auto& [name, variables, job] : kOtherLaunchers) {
    auto several_hosts = variables;
    for (const char* one_host : {"MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE",
                                 "FLUX_JOB_NNODES", "PALS_LOCAL_SIZE", "LOCAL_WORLD_SIZE"})
      several_hosts.erase(one_host);
    several_hosts["MASTER_PORT"] = "9";
    expect_error(several_hosts, {name, "several hosts", "MASTER_ADDR is not set", "MASTER_ADDR", "<host>"});
    several_hosts["MASTER_ADDR"] = "host0";
    EXPECT_EQ(parse(several_hosts).local_world_size, 0) << name;
  }
  expect_error(with(kOtherLaunchers[0].variables, {{"MPI_LOCALNRANKS", "2"}, {"MASTER_ADDR", "host0"}}),
               {"MASTER_PORT is not set"});  // each host has its own server of PMI
}

TEST(LaunchEnvironment, HydrasJobIsTheProcessAtTheOtherEndOfPmi) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  auto variables = without(kOtherLaunchers[0].variables, "PMI_PORT");
  expect_error(variables, {"MASTER_PORT is not set"});
  variables["PMI_FD"] = std::to_string(ends[1]);
  EXPECT_EQ(parse(variables).job, "pmi-" + std::to_string(::getpid()));
  for (const int end : ends) ::close(end);
}

TEST(LaunchEnvironment, OtherLaunchersOfOneRankAreNone) {
  EXPECT_FALSE(parse({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).launched());
  EXPECT_FALSE(
      parse({{"FLUX_TASK_RANK", "0"}, {"FLUX_JOB_SIZE", "1"}, {"PMI_SIZE", "1"}, {"PMI_RANK", "0"}}).launched());
  EXPECT_EQ(parse(with(kOpenMpi, {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}})).launcher, "Open MPI");
  EXPECT_EQ(parse(with(kTorchrun, {{"PMIX_RANK", "0"}})).rank, 5) << "by spawn_local in a shell that prun has started";
}

TEST(LaunchEnvironment, SrunsPmiIsSrun) {
  const Environment pmi[] = {{{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}}, {{"PMIX_RANK", "5"}}, {{"PALS_RANKID", "5"}}};
  for (const auto& variables : pmi) {
    const auto environment = parse(with(kSlurm, variables));
    EXPECT_EQ(environment.launcher, "Slurm");
    EXPECT_EQ(environment.master_address, "node07");
  }
  // Hydra starts its daemons with srun, one a node.
  const Environment step = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_ID", "0"}};
  EXPECT_EQ(parse(with(kOtherLaunchers[0].variables, step)).launcher, "MPICH or Intel MPI");
  EXPECT_FALSE(parse(with(step, {{"PMIX_RANK", "0"}})).launched());
}

TEST(LaunchEnvironment, MpirunInsideOfASlurmJobWins) {
  // mpirun's daemons are tasks of an srun step of their own, with one task per node.
  const auto environment =
      parse(with(kOpenMpi, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_ID", "0"}}));
  EXPECT_EQ(environment.launcher, "Open MPI");
  EXPECT_EQ(environment.rank, 2);
}

TEST(LaunchEnvironment, TorchrunUnderAnotherLauncherWins) {
  const Environment one_per_node =
      with(kSlurm, {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NUM_TASKS", "2"}});
  EXPECT_EQ(parse(with(one_per_node, kTorchrun)).rank, 5) << "one of node 1's four";
  EXPECT_EQ(parse(with(with(kOpenMpi, kTorchrun), {{"TORCHELASTIC_RUN_ID", "r"}})).launcher, "torchrun");
}

TEST(LaunchEnvironment, TheSameGroupTwiceIsFine) {
  const auto environment = parse(with(kSlurm, kTorchrun));
  EXPECT_EQ(environment.launcher, "RANK and WORLD_SIZE");
  // Scripts export one of the two for other programs.
  EXPECT_EQ(parse(with(kSlurm, {{"WORLD_SIZE", "8"}})).launcher, "Slurm");
  EXPECT_EQ(parse(with(kOpenMpi, {{"RANK", "2"}})).launcher, "Open MPI");
}

TEST(LaunchEnvironment, ContradictionsNameBoth) {
  expect_error(with(kOpenMpi, kTorchrun),
               {"contradict", "RANK=5", "WORLD_SIZE=8", "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=3"});
  expect_error(with(with(kSlurm, {{"SLURM_PROCID", "4"}}), kTorchrun),
               {"RANK=5", "SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=8"});
  expect_error(with(kOpenMpi, {{"WORLD_SIZE", "4"}}), {"RANK is not set", "WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=3"});
}

TEST(DeviceChoice, IsTheOneAskedForTheOnlyOneOrTheLocalRanks) {
  const c10::Device any(c10::kCUDA);
  const auto index = [](c10::Device wanted, const Environment& variables, int visible_count) {
    return static_cast<int>(choose_cuda_device(wanted, parse(variables), visible_count).index());
  };
  EXPECT_EQ(index(any, kTorchrun, 4), 1);
  EXPECT_EQ(index(any, kTorchrun, 1), 0) << "Slurm's --gpus-per-task shows each process its own";
  EXPECT_EQ(index(any, with(kTorchrun, {{"LOCAL_RANK", "3"}}), 4), 3);
  EXPECT_EQ(index({c10::kCUDA, 2}, kTorchrun, 4), 2);
  const auto refusal = [&](c10::Device wanted, const Environment& variables, int visible_count) -> std::string {
    try {
      return "device " + std::to_string(index(wanted, variables, visible_count));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  const auto expect_refused = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_refused(refusal(any, with(kTorchrun, {{"LOCAL_RANK", "2"}}), 2),
                 "LOCAL_RANK is 2, but this process sees 2 CUDA devices");
  expect_refused(refusal({c10::kCUDA, 2}, kTorchrun, 2), "InitOptions::device is cuda:2, but this process sees 2");
  expect_refused(refusal(any, without(without(kTorchrun, "LOCAL_RANK"), "LOCAL_WORLD_SIZE"), 2),
                 "does not say which rank of its host this is");
}

TEST(HostList, Expands) {
  using Hosts = std::vector<std::string>;
  EXPECT_EQ(expand_host_list("node1"), (Hosts{"node1"}));
  EXPECT_EQ(expand_host_list("node[03-05,9],gpu1"), (Hosts{"node03", "node04", "node05", "node9", "gpu1"}));
  EXPECT_EQ(expand_host_list("a,b-1,c.d"), (Hosts{"a", "b-1", "c.d"}));
  EXPECT_EQ(expand_host_list("n[098-101]"), (Hosts{"n098", "n099", "n100", "n101"}));
  EXPECT_EQ(expand_host_list("r[1-2]n[1-2]"), (Hosts{"r1n1", "r1n2", "r2n1", "r2n2"}));
  EXPECT_EQ(expand_host_list("n[1-2]-ib0"), (Hosts{"n1-ib0", "n2-ib0"}));
  EXPECT_EQ(expand_host_list("n[0-65535]").size(), 65536u);
}

TEST(HostList, RefusesWhatSlurmCannotHaveWritten) {
  for (const char* list : {"",
                           ",",
                           "a,",
                           ",a",
                           "a,,b",
                           "n[",
                           "n]",
                           "n[]",
                           "n[1",
                           "n[1-]",
                           "n[-1]",
                           "n[2-1]",
                           "n[a-b]",
                           "n[1,]",
                           "n[1-2-3]",
                           "n[[1]]",
                           "n[1]]",
                           "n[0-65536]",
                           "n[0-9999999999999]",
                           "n[0-999]m[0-999]"}) {
    EXPECT_THROW(expand_host_list(list), std::invalid_argument) << list;
  }
}

TEST(TaskCounts, Expands) {
  EXPECT_EQ(expand_task_counts("4"), (std::vector<int>{4}));
  EXPECT_EQ(expand_task_counts("4(x2),3"), (std::vector<int>{4, 4, 3}));
  for (const char* counts : {"", "x", "4(x", "4(x)", "4(x0)", "4(2)", "4,", "-1", "4(x2)3", "4(x99999999)"}) {
    EXPECT_THROW(expand_task_counts(counts), std::invalid_argument) << counts;
  }
}

TEST(DerivedPort, StaysBelowThePortsOfOutgoingConnections) {
  for (int job = 0; job < 1000; ++job) {
    const int port = derived_port(std::to_string(job));
    EXPECT_GE(port, 15000);
    EXPECT_LT(port, 31000);
  }
  EXPECT_EQ(derived_port("4711.0"), derived_port("4711.0"));
}

}  // namespace
}  // namespace tessera::launch_environment_test
