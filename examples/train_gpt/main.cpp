// Trains a GPT with its state sharded over ranks. Reading order: gpt.h, the model; model.cpp, the wrappers;
// trainer.cpp, the loop; run.cpp, which combines them.

namespace train_gpt {
struct TrainOptions;
// Declared here, because run.h includes torch/torch.h, which takes 20 s to compile.
int program(int argc, char** argv, void (*plans)(const TrainOptions& options));
}  // namespace train_gpt

int main(int argc, char** argv) { return train_gpt::program(argc, argv, nullptr); }
