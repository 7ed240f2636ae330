// An MPI program in which Tessera's groups are guests. Started by mpi_test.cmake with 1 to 4 ranks, once for each MPI.
#include <tessera/mpi.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>

#include "tests/guest/guests.h"

namespace {

using namespace tessera;
using namespace tessera::testing_support;
using namespace std::chrono_literals;

int world_rank = 0, world_size = 1;

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

void expect_error(const std::string& part, const std::function<void()>& call) {
  const std::string error = error_of(call);
  expect(error.find(part) != std::string::npos, "the error is '" + error + "', expected '" + part + "'");
}

long entries_of(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

// The program's own traffic: a receive of any sender and tag that stays pending, and sums on demand.
class HostTraffic {
 public:
  HostTraffic() { MPI_Irecv(&received_, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request_); }
  static void sum() {
    int total = 0;
    MPI_Allreduce(&world_rank, &total, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    expect(total == world_size * (world_size - 1) / 2, "a sum of the program is wrong");
  }
  void finish() {
    const int to = (world_rank + 1) % world_size;
    MPI_Send(&to, 1, MPI_INT, to, 5, MPI_COMM_WORLD);
    MPI_Wait(&request_, MPI_STATUS_IGNORE);
    expect(received_ == world_rank, "the program received a message that is not its own");
  }

 private:
  int received_ = -1;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

std::vector<at::Tensor> check_group(const std::shared_ptr<Communicator>& comm) {
  check_collectives(*comm);
  std::vector<at::Tensor> values;
  for (const Wrapper wrapper : {Wrapper::kDdp, Wrapper::kOssSdp, Wrapper::kFsdp}) {
    HostTraffic::sum();
    values = train_forces(comm, wrapper);
    expect(difference_from_reference(values, comm->size()) < 1e-12, "training differs from one process");
  }
  return values;
}

void check_both_transports() {
  const auto by_memory = check_group(communicator_from_mpi(MPI_COMM_WORLD, {.timeout = 60s}));
  const auto by_mpi = check_group(communicator_from_mpi(MPI_COMM_WORLD, {.backend = "mpi", .timeout = 60s}));
  for (size_t i = 0; i < by_mpi.size(); ++i) expect(torch::equal(by_mpi[i], by_memory[i]), "the transports differ");
  check_collectives(*communicator_from_mpi(MPI_COMM_WORLD, {.timeout = 60s, .peer_memory = false}));
  check_collectives(*communicator_from_mpi_f(MPI_Comm_c2f(MPI_COMM_WORLD), {.timeout = 60s}));
}

void check_sub_communicators() {
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, -world_rank, &half);
  int rank = 0, size = 0;
  MPI_Comm_rank(half, &rank);
  MPI_Comm_size(half, &size);
  for (const char* backend : {"", "mpi"}) {
    const auto comm = communicator_from_mpi(half, {.backend = backend, .timeout = 60s});
    const auto all = communicator_from_mpi(MPI_COMM_WORLD, {.backend = backend, .timeout = 60s});
    expect(comm->rank() == rank && comm->size() == size, "the ranks are not those of the sub-communicator");
    check_collectives(*comm);
    check_collectives(*all);
  }
  const auto comm = communicator_from_mpi(half, {.backend = "mpi", .timeout = 60s});
  MPI_Comm_free(&half);
  check_collectives(*comm);
}

void check_errors() {
  expect_error("the communicator is MPI_COMM_NULL", [] { communicator_from_mpi(MPI_COMM_NULL); });
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  const MPI_Comm freed = copy;
  MPI_Comm_free(&copy);
  expect_error("the communicator is not valid, perhaps because it was freed", [&] { communicator_from_mpi(freed); });
  expect_error("expected the thread that called MPI_Init_thread()", [] {
    std::string error;
    std::thread([&] { error = error_of([] { communicator_from_mpi(MPI_COMM_SELF); }); }).join();
    throw std::runtime_error(error);
  });
  if (world_size == 1) return;
  expect_error("rank 1 passes backend \"\", device cpu, timeout 50000 ms",
               [] { communicator_from_mpi(MPI_COMM_WORLD, {.timeout = world_rank == 1 ? 50s : 60s}); });
  expect_error("on rank 1 of ", [] {
    communicator_from_mpi(MPI_COMM_WORLD, {.backend = world_rank == 1 ? "ucc" : "gloo", .timeout = 60s});
  });
  expect_error("not all ranks of the communicator have called it within", [] {
    if (world_rank == 0) {
      communicator_from_mpi(MPI_COMM_WORLD, {.timeout = 300ms});
      return;
    }
    std::this_thread::sleep_for(600ms);
    MPI_Comm late = MPI_COMM_NULL;  // so that MPI_Finalize() finds no call without a counterpart
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Comm_idup(MPI_COMM_WORLD, &late, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    throw std::runtime_error("not all ranks of the communicator have called it within");
  });
  MPI_Barrier(MPI_COMM_WORLD);
}

// The training thread need not be MPI's.
void check_another_thread() {
  const auto comm = communicator_from_mpi(MPI_COMM_WORLD, {.timeout = 60s});
  std::string error;
  std::thread([&] {
    at::set_num_threads(1);
    error = error_of([&] { check_collectives(*comm); });
  }).join();
  expect(error == "no error", error);
  const auto by_mpi = communicator_from_mpi(MPI_COMM_WORLD, {.backend = "mpi", .timeout = 60s});
  if (world_size == 1) return;
  std::thread([&] { error = error_of([&] { by_mpi->barrier(); }); }).join();
  expect(error.find("this thread may not call MPI") != std::string::npos, error);
}

void check_that_nothing_is_left() {
  const auto make = [](int count) {
    for (int i = 0; i < count; ++i) {
      const auto comm = communicator_from_mpi(MPI_COMM_WORLD, {.backend = i % 2 == 0 ? "" : "mpi", .timeout = 60s});
      comm->barrier();
    }
  };
  make(20);
  const long descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  make(world_size == 2 ? 100 : 10);
  expect(entries_of("/proc/self/fd") <= descriptors, "descriptors are left");
  for (int i = 0; i < 1000 && entries_of("/proc/self/task") > threads; ++i) std::this_thread::sleep_for(10ms);
  expect(entries_of("/proc/self/task") <= threads, "threads are left");
}

void run() {
  at::set_num_threads(1);
  HostTraffic traffic;
  check_both_transports();
  check_sub_communicators();
  check_another_thread();
  check_that_nothing_is_left();
  traffic.finish();
  check_errors();
}

}  // namespace

int main(int argc, char** argv) {
  if (error_of([] { communicator_from_mpi(MPI_COMM_WORLD); }).find("MPI is not initialized") == std::string::npos)
    return 3;
  int level = 0, code = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  std::shared_ptr<Communicator> kept;
  try {
    run();
    kept = communicator_from_mpi(MPI_COMM_WORLD, {.backend = "mpi", .timeout = 60s});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d of %d: %s\n", world_rank, world_size, error.what());
    code = 1;
    MPI_Abort(MPI_COMM_WORLD, code);
  }
  MPI_Finalize();
  if (world_size > 1 && error_of([&] { kept->barrier(); }).find("MPI is finalized") == std::string::npos) return 4;
  return code;
}
