// An MPI solver that trains a surrogate of itself while it runs.
//
// The solver computes nonlinear heat conduction, du/dt = div((1 + u^2) grad u), in fp64 on a square grid. Each
// MPI rank has some rows. A small network learns the solver's next kStride steps at a point from the point's
// neighbourhood. All ranks but the last train it, in a group made from an MPI sub-communicator. Every kReportEvery
// strides they save a checkpoint. The last rank loads it and tests the surrogate on its own rows, which the network has
// never seen.
//
//   mpirun -n 4 mpi_host ddp|sdp|fsdp [STRIDES] [SHARE] [FOLDER]
//
// SHARE is the part of the time that training may take, 0.5 by default, below 1. FOLDER gets the checkpoint, error.csv
// and error.svg, the error over time.
#include <tessera/mpi.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr int kWidth = 64;                           // width and height of the grid
constexpr int kStride = 2;                           // steps that the surrogate predicts at once
constexpr int kPatch = 2 * kStride + 1;              // width of the square that determines a point kStride steps later
constexpr int kBatch = 128;                          // points per rank and training step
constexpr int kReportEvery = 10;                     // strides between checkpoints
constexpr double kChange = 0.05, kDifference = 0.2;  // kDifference: scale of the differences in the network's input
constexpr double kTimeStep = 0.05;                   // stable for a grid spacing of 1 while u is below 1.5

// The solver on this rank's rows, and a copy of one row of each neighbour.
class Solver {
 public:
  explicit Solver(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    rows_ = kWidth * (rank_ + 1) / size_ - kWidth * rank_ / size_;
    first_row_ = kWidth * rank_ / size_;
    u_ = torch::zeros({rows_ + 2, kWidth + 2}, torch::kDouble);
    // Starts with hot and cold spots.
    const auto rows = torch::arange(first_row_, first_row_ + rows_, torch::kDouble).unsqueeze(1);
    const auto columns = torch::arange(kWidth, torch::kDouble);
    for (int spot = 0; spot < 40; ++spot) {
      const auto distance = (rows - spot * 37 % kWidth).square() + (columns - (spot * 23 + 11) % kWidth).square();
      interior().add_(torch::exp(-distance / (8 + spot % 5 * 4)), spot % 2 == 0 ? 1 : -1);
    }
  }

  void step() {
    exchange_rows();
    const auto at = [&](int down, int right) {
      return u_.slice(0, 1 + down, 1 + down + rows_).slice(1, 1 + right, 1 + right + kWidth);
    };
    const at::Tensor centre = at(0, 0);
    const auto flux = [&](const at::Tensor& other) {
      return (1 + 0.5 * (centre.square() + other.square())) * (other - centre);
    };
    const at::Tensor change = flux(at(-1, 0)) + flux(at(1, 0)) + flux(at(0, -1)) + flux(at(0, 1));
    centre.add_(change, kTimeStep);
  }

  at::Tensor field() const { return interior().clone(); }
  int rows() const { return rows_; }

 private:
  at::Tensor interior() const { return u_.slice(0, 1, 1 + rows_).slice(1, 1, 1 + kWidth); }

  void exchange_rows() {
    const int up = rank_ > 0 ? rank_ - 1 : MPI_PROC_NULL, down = rank_ + 1 < size_ ? rank_ + 1 : MPI_PROC_NULL;
    auto* const data = u_.mutable_data_ptr<double>();
    const auto row = [&](int number) { return data + static_cast<std::ptrdiff_t>(number) * (kWidth + 2); };
    MPI_Sendrecv(row(1), kWidth + 2, MPI_DOUBLE, up, 0, row(rows_ + 1), kWidth + 2, MPI_DOUBLE, down, 0, comm_,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(row(rows_), kWidth + 2, MPI_DOUBLE, down, 1, row(0), kWidth + 2, MPI_DOUBLE, up, 1, comm_,
                 MPI_STATUS_IGNORE);
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1, rows_ = 0, first_row_ = 0;
  at::Tensor u_;
};

struct SurrogateImpl : torch::nn::Module {
  torch::nn::Linear in = register_module("in", torch::nn::Linear(kPatch* kPatch, 48));
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(48, 48));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(48, 1));
  SurrogateImpl() { to(torch::kDouble); }
  // Returns the predicted change of each patch's middle point.
  at::Tensor forward(const at::Tensor& patches) {
    // Differences from the point determine the flux. The point's own value affects only the conductivity.
    const at::Tensor point = patches.slice(1, kPatch * kPatch / 2, kPatch * kPatch / 2 + 1);
    at::Tensor features = (patches - point) / kDifference;
    features = features + point * own_value();
    return out(torch::tanh(hidden(torch::tanh(in(features))))).squeeze(1);
  }
  // Returns a mask that is 1 at a patch's middle point, and 0 elsewhere.
  static at::Tensor own_value() {
    at::Tensor mask = torch::zeros({kPatch * kPatch}, torch::kDouble);
    mask[kPatch * kPatch / 2] = 1;
    return mask;
  }
};
TORCH_MODULE(Surrogate);

// The patches around points, and the changes of the points. draw() chooses `count` points at random; 0: all points.
struct Points {
  at::Tensor patches, changes;
};
Points draw(const at::Tensor& before, const at::Tensor& after, int count = 0) {
  const auto all = before.unfold(0, kPatch, 1).unfold(1, kPatch, 1).reshape({-1, kPatch * kPatch});
  const auto changes =
      (after - before).slice(0, kStride, before.size(0) - kStride).slice(1, kStride, kWidth - kStride).reshape({-1});
  if (count == 0) return {all, changes};
  const auto chosen = torch::randint(all.size(0), {count}, torch::kLong);
  return {all.index_select(0, chosen), changes.index_select(0, chosen)};
}

// Returns the error relative to that of a surrogate that predicts no change.
double relative_error(SurrogateImpl& surrogate, const Points& points) {
  const torch::NoGradGuard no_grad;
  return ((surrogate.forward(points.patches) - points.changes).norm() / points.changes.norm()).item<double>();
}

void plot(const std::filesystem::path& folder, const std::vector<std::pair<int, double>>& errors) {
  std::ofstream table(folder / "error.csv");
  table << "stride,relative_error\n";
  std::ofstream picture(folder / "error.svg");
  picture << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-40 -10 460 240\" font-size=\"11\">\n"
             "<rect x=\"-40\" y=\"-10\" width=\"460\" height=\"240\" fill=\"white\"/>\n"
             "<path d=\"M0 0V200H400\" fill=\"none\" stroke=\"black\"/><text x=\"140\" y=\"222\">strides of the solver"
             "</text><text x=\"4\" y=\"8\">relative error of the surrogate, 1 at the top</text>\n"
             "<polyline fill=\"none\" stroke=\"steelblue\" stroke-width=\"2\" points=\"";
  for (const auto& [stride, error] : errors) {
    table << stride << ',' << error << '\n';
    picture << 400.0 * stride / errors.back().first << ',' << 200 - 200 * std::min(error, 1.0) << ' ';
  }
  picture << "\"/>\n</svg>\n";
}

const std::map<std::string, int> kStages = {{"ddp", 0}, {"sdp", 2}, {"fsdp", 3}};  // by wrapper

void run(const std::string& wrapper, int strides, double share, const std::filesystem::path& folder) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int trainers = std::max(1, size - 1), tester = size - 1;
  at::set_num_threads(1);  // leaves the other cores to the other ranks
  Solver solver(MPI_COMM_WORLD);
  if (solver.rows() < kPatch)
    throw std::invalid_argument("too many ranks: each needs " + std::to_string(kPatch) + " rows");

  MPI_Comm training = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank < trainers ? 0 : MPI_UNDEFINED, rank, &training);
  torch::manual_seed(1);  // equal parameters on all ranks
  Surrogate surrogate;
  std::shared_ptr<tessera::Communicator> comm;
  using Training = tessera::Zero<Surrogate, torch::optim::Adam>;
  std::unique_ptr<Training> zero;
  if (training != MPI_COMM_NULL) {
    comm = tessera::communicator_from_mpi(training);
    zero.reset(
        new Training(tessera::zero(surrogate, torch::optim::AdamOptions(2e-3), comm, {.stage = kStages.at(wrapper)})));
  }
  torch::manual_seed(100 + rank);

  std::vector<std::pair<int, double>> errors;
  const double began = MPI_Wtime();
  double trained_s = 0;
  for (int stride = 1; stride <= strides; ++stride) {
    const at::Tensor before = solver.field();
    for (int step = 0; step < kStride; ++step) solver.step();
    const at::Tensor after = solver.field();
    if (comm) {
      // Rank 0's clock decides for all ranks, which must take the same number of steps.
      for (int may_train = 1; may_train != 0;) {
        const double at = MPI_Wtime();
        const auto [patches, changes] = draw(before, after, kBatch);
        zero->zero_grad();
        torch::mse_loss((*zero)(patches), changes).backward();
        zero->step();
        trained_s += MPI_Wtime() - at;
        may_train = trained_s < share * (MPI_Wtime() - began) ? 1 : 0;
        MPI_Bcast(&may_train, 1, MPI_INT, 0, training);
      }
    }
    if (stride % kReportEvery != 0) continue;
    if (comm) tessera::save_checkpoint(folder / "surrogate", *zero, {{"stride", stride}});
    MPI_Barrier(MPI_COMM_WORLD);  // waits until the checkpoint is complete
    if (rank == tester) {
      Surrogate loaded;
      const auto alone = tessera::communicator_from_mpi(MPI_COMM_SELF);
      tessera::DistributedDataParallel replica(loaded, alone);
      tessera::load_checkpoint(folder / "surrogate", replica);
      errors.emplace_back(stride, relative_error(*loaded, draw(before, after)));
    }
    MPI_Barrier(MPI_COMM_WORLD);  // waits until the tester has read the checkpoint
  }
  if (rank == tester) {
    plot(folder, errors);
    for (const auto& [stride, error] : errors) std::printf("stride %4d: relative error %.4f\n", stride, error);
  }
  if (rank == 0)
    std::printf("%s: training took %.2f of the time\n", wrapper.c_str(), trained_s / (MPI_Wtime() - began));
  zero.reset();
  comm.reset();
  if (training != MPI_COMM_NULL) MPI_Comm_free(&training);
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::string wrapper = argc > 1 ? argv[1] : "", number = argc > 2 ? argv[2] : "100",
                    part = argc > 3 ? argv[3] : "0.5", folder = argc > 4 ? argv[4] : "mpi_host_out";
  const int strides = std::atoi(number.c_str());
  char* end = nullptr;
  const double share = std::strtod(part.c_str(), &end);
  if (argc > 5 || !kStages.contains(wrapper) || strides < 1 || std::to_string(strides) != number || *end != '\0' ||
      !(share > 0.0 && share < 1.0) || folder.empty()) {
    if (rank == 0) std::fprintf(stderr, "usage: mpi_host ddp|sdp|fsdp [STRIDES] [SHARE] [FOLDER]\n");
    MPI_Finalize();
    return 2;
  }
  int code = 0;
  try {
    std::filesystem::create_directories(folder);
    run(wrapper, strides, share, folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_host: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, code = 1);
  }
  MPI_Finalize();
  return code;
}
