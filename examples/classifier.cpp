// An image classifier with all parts of a training program: a data loader with worker threads and augmentation, batch
// norms over all ranks, weight decay of matrices only, a learning-rate schedule, validation, and checkpoints. Ctrl-C
// saves, and the next run continues within the epoch, on any number of ranks and in any stage.
//
//   classifier FOLDER [EPOCHS [STAGE]]      checkpoints in FOLDER; 5 epochs in ZeRO stage 2 by default
#include <ATen/CPUGeneratorImpl.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kClasses = 4, kSize = 16, kTraining = 768, kValidation = 130, kBatch = 16;
using Model = tessera::Zero<torch::nn::Sequential, torch::optim::AdamW>;
using torch::optim::AdamWOptions;
namespace data = torch::data;

// Synthetic images [3, 16, 16]: stripes in one of four directions, under noise. An index always gives the same image.
class Images : public data::datasets::Dataset<Images> {
 public:
  Images(int64_t first, int64_t numel) : first_(first), numel_(numel) {}

  data::Example<> get(size_t index) override {
    const int64_t item = first_ + static_cast<int64_t>(index), label = item % kClasses;
    auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(item));
    const auto x = torch::arange(kSize).expand({kSize, kSize}), y = x.t();
    const auto across = label == 0 ? x : label == 1 ? y : label == 2 ? x + y : x - y;
    const auto stripes = torch::sin(across * 0.8 + torch::rand({1}, random) * 6.3);
    return {stripes + torch::randn({3, kSize, kSize}, random), torch::tensor(label)};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(numel_); }

 private:
  int64_t first_, numel_;
};

// At random, rotates an image by half a turn or not, and shifts it by up to two pixels.
struct Augment : data::transforms::TensorTransform<> {
  at::Tensor operator()(at::Tensor image) override {
    const auto random = torch::randint(0, 10, {3}).to(torch::kInt64);
    const auto at = random.accessor<int64_t, 1>();
    if (at[0] % 2 == 0) image = image.flip({1, 2});
    return torch::constant_pad_nd(image, {2, 2, 2, 2}).narrow(1, at[1] % 5, kSize).narrow(2, at[2] % 5, kSize);
  }
};

torch::nn::Sequential make_network() {
  using namespace torch::nn;
  torch::manual_seed(1);
  Sequential network;
  for (const auto& [from, to] : std::vector<std::pair<int, int>>{{3, 16}, {16, 32}, {32, 64}}) {
    network->push_back(Conv2d(Conv2dOptions(from, to, 3).padding(1).stride(from == 3 ? 1 : 2).bias(false)));
    network->push_back(BatchNorm2d(to));
    network->push_back(ReLU());
  }
  network->push_back(AdaptiveAvgPool2d(1));
  network->push_back(Flatten());
  network->push_back(Linear(64, kClasses));
  return network;
}

// Returns the fraction of the validation images that the model classifies correctly. Counts each image once. So ranks
// may have different numbers of batches: a rank without a batch still runs the model, with the others. Collective.
double accuracy_of(Model& model) {
  const torch::NoGradGuard no_grad;
  tessera::Communicator& comm = *model.comm();
  const tessera::DistributedSampler sampler(kValidation, comm.rank(), comm.size(),
                                            {.batch_numel = kBatch, .shuffle = false, .partition = true});
  auto images = Images(kTraining, kValidation).map(data::transforms::Stack<>());
  auto loader = data::make_data_loader(std::move(images), sampler, data::DataLoaderOptions(kBatch));
  auto right_and_all = torch::zeros({2}, torch::kFloat64);
  model.module()->eval();
  auto batch = loader->begin();
  while (tessera::ranks_with_data(comm, batch != loader->end())) {
    const bool has_batch = batch != loader->end();
    const auto inputs = has_batch ? batch->data : torch::zeros({1, 3, kSize, kSize});
    const auto classes = model(inputs.to(comm.device())).argmax(1).cpu();
    if (!has_batch) continue;
    right_and_all[0] += classes.eq(batch->target).sum();
    right_and_all[1] += batch->target.numel();
    ++batch;
  }
  model.module()->train();
  right_and_all = tessera::reduce_to_host(comm, right_and_all, tessera::ReduceOp::kSum, "the accuracy");
  return (right_and_all[0] / right_and_all[1]).item<double>();
}

int train(const std::string& folder, int64_t epochs, int stage, const std::shared_ptr<tessera::Communicator>& comm) {
  auto network = make_network();
  network->to(comm->device());
  tessera::convert_sync_batch_norm(*network, *comm);
  const auto adamw = AdamWOptions(2e-3).weight_decay(0.05);
  tessera::ZeroOptions options{.stage = stage};
  options.groups = [&](const auto& parameters) { return tessera::decay_groups(parameters, adamw); };
  Model model(network, adamw, comm, options);

  tessera::DistributedSampler sampler(kTraining, comm->rank(), comm->size(),
                                      {.batch_numel = kBatch, .seed = 1, .drop_last = true});
  auto loader = data::make_data_loader(Images(0, kTraining).map(Augment()).map(data::transforms::Stack<>()), sampler,
                                       data::DataLoaderOptions(kBatch).workers(2));
  tessera::WarmupCosineLR schedule(model.optimizer(), 10, std::max<int64_t>(epochs * sampler.batches_left(), 10));

  const tessera::TrainingState state{model, model.optimizer(), schedule, sampler};
  double best = 0.0;
  if (const auto loaded = tessera::load_newest_checkpoint(folder, state)) {
    best = loaded->extra["best"].get<double>();
    if (comm->rank() == 0) std::cout << "continues in epoch " << sampler.epoch() + 1 << std::endl;
  }
  auto save = [&](const std::string& name) { tessera::save_checkpoint(folder + "/" + name, state, {{"best", best}}); };

  while (sampler.epoch() < epochs) {
    const int64_t epoch = sampler.epoch() + 1;
    for (const auto& batch : *loader) {
      const auto loss =
          torch::cross_entropy_loss(model(batch.data.to(comm->device())), batch.target.to(comm->device()));
      model.zero_grad();
      loss.backward();
      model.clip_grad_norm_(1.0);
      model.step();
      schedule.step();
      if (const int signal = tessera::stop_requested(*comm)) {  // equal on all ranks
        save("last");
        return 128 + signal;
      }
    }
    const double accuracy = accuracy_of(model);
    if (comm->rank() == 0) std::cout << "epoch " << epoch << ": accuracy " << accuracy << std::endl;
    best = std::max(best, accuracy);
    if (accuracy == best) save("best");
    save("last");  // after "best", so that "last" is the newest checkpoint
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "", number = argc > 2 ? argv[2] : "5",
                    stage = argc > 3 ? argv[3] : "2";
  const int64_t epochs = std::strtoll(number.c_str(), nullptr, 10);
  const bool is_stage = stage == "0" || stage == "1" || stage == "2" || stage == "3";
  if (argc > 4 || folder.empty() || folder[0] == '-' || epochs < 1 || epochs > 1'000'000 ||
      std::to_string(epochs) != number || !is_stage)
    return std::cerr << "usage: classifier FOLDER [EPOCHS [STAGE]]\n", 2;
  if (!tessera::launched()) return tessera::spawn_local(2, argc, argv);
  return tessera::run_main([&] { return train(folder, epochs, std::stoi(stage), tessera::init()); });
}
