#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace train_gpt {

struct LossPoint {
  double step = 0.0;
  double loss = 0.0;
};

struct LossCurves {
  std::vector<LossPoint> train;       // a point a step
  std::vector<LossPoint> validation;  // fewer
  double unigram_loss = 0.0;
};

// An SVG picture of the curves over the steps; the training loss also as a moving average. Needs a
// training point.
std::string draw_losses(const LossCurves& curves);

// Throws std::runtime_error if the file cannot be written.
void write_loss_plot(const std::filesystem::path& path, const LossCurves& curves);

}  // namespace train_gpt
