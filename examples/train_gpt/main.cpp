// Trains a GPT (gpt.h) with its state sharded over ranks. Reading order: gpt.h, which knows nothing of ranks;
// distributed.cpp, which wraps it; trainer.cpp, the loop; then whatever you like.

#include "program.h"

int main(int argc, char** argv) { return train_gpt::program(argc, argv); }
