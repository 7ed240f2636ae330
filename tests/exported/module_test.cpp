// On one process: values, gradients and buffers equal Python's; names, modes and refused inputs.
#include <gtest/gtest.h>

#include <algorithm>

#include <tessera/exported.h>
#include "tests/exported/expected.h"
#include "tests/support/reference.h"

namespace tessera::exported_test {
using namespace internal;
namespace {

using namespace testing_support;

class Archives : public testing::TestWithParam<const char*> {};

// A step in the mode of the export; dropout draws the same numbers as in Python.
TEST_P(Archives, ComputeWhatPythonComputes) {
  const std::string name = GetParam();
  const Expected expected(name);
  auto model = load(name);
  NamedInputs inputs = expected.inputs();
  const ExportedValue outputs = seeded(5, [&] { return model->forward(inputs); });
  std::vector<ExportedValue> leaves;
  collect_leaves(outputs, leaves);
  for (const auto& [index, tensor] : expected.with("output."))
    expect_close(leaves.at(std::stoul(index)).tensor(), tensor, name + ": output " + index);
  const at::Tensor loss = loss_of(outputs);
  expect_close(loss, expected.at("loss"), name + ": loss");
  loss.backward();
  size_t with_gradient = 0;
  for (const auto& parameter : model->named_parameters()) {
    if (name.starts_with("control") &&
        parameter.key().starts_with("b.")) {  // of the branch not taken: Python's gradients are 0
      EXPECT_FALSE(parameter.value().grad().defined());
      EXPECT_EQ(expected.at("grad." + parameter.key()).count_nonzero().item<int64_t>(), 0);
      ++with_gradient;
      continue;
    }
    if (parameter.key() == "head.weight") continue;  // another name of embed.weight
    ASSERT_EQ(parameter.value().grad().defined(), expected.has("grad." + parameter.key())) << parameter.key();
    if (!parameter.value().grad().defined()) continue;
    ++with_gradient;
    expect_close(parameter.value().grad(), expected.at("grad." + parameter.key()), name + ": " + parameter.key());
  }
  EXPECT_EQ(with_gradient, expected.with("grad.").size());
  for (const auto& buffer : model->named_buffers())
    expect_close(buffer.value(), expected.at("buffer." + buffer.key()), name + ": " + buffer.key());
  for (const auto& [input, tensor] : expected.with("mutated."))
    for (const auto& [own, value] : inputs.inputs())
      if (own == input) expect_close(value.tensor(), tensor, name + ": changed input " + input);
}

TEST_P(Archives, EvaluateAsPythonDoes) {
  const std::string name = GetParam();
  const Expected expected(name);
  auto model = load(name);
  model->eval();
  const at::NoGradGuard no_grad;
  if (name == "random")
    return expect_contains(error_of<std::invalid_argument>([&] { model->forward(expected.inputs()); }), "'path'");
  std::map<std::string, at::Tensor> before;
  for (const auto& buffer : model->named_buffers()) before[buffer.key()] = buffer.value().clone();
  for (int times = 0; times < 2; ++times) {
    std::vector<ExportedValue> leaves;
    collect_leaves(model->forward(expected.inputs()), leaves);
    for (const auto& [index, tensor] : expected.with("eval."))
      expect_close(leaves.at(std::stoul(index)).tensor(), tensor, name + ": output " + index);
  }
  if (name.starts_with("control")) return;  // counts its calls in both modes
  for (const auto& buffer : model->named_buffers())
    EXPECT_TRUE(at::equal(buffer.value(), before[buffer.key()])) << name << ": " << buffer.key();
}

INSTANTIATE_TEST_SUITE_P(All, Archives,
                         testing::Values("decoder", "decoder_meta", "norms", "norms_decomposed", "norms_eval",
                                         "norms_eval_decomposed", "control", "recurrent", "energy", "adapted",
                                         "guarded", "random"),
                         [](const auto& param) { return std::string(param.param); });

// The oldest and the newest supported torch.
INSTANTIATE_TEST_SUITE_P(OfVersions, Archives,
                         testing::Values("decoder_2.9", "norms_2.9", "control_2.9", "decoder_2.15", "norms_2.15",
                                         "control_2.15"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST(ExportedModule, HasPythonsNamesAndClasses) {
  auto model = load_exported(data_file("decoder.pt2"));
  auto parameters = model->named_parameters();
  EXPECT_TRUE(parameters.contains("blocks.1.qkv.weight"));
  EXPECT_TRUE(parameters["head.weight"].is_same(parameters["embed.weight"]));
  auto modules = model->named_modules();
  EXPECT_EQ(modules["blocks.0"]->name().substr(modules["blocks.0"]->name().rfind('.')), ".Block");
  EXPECT_EQ(modules["blocks.0.up"]->name(), "torch.nn.modules.linear.Linear");
  EXPECT_EQ(model->input_names(), (std::vector<std::string>{"ids", "labels"}));
  expect_contains(model->describe(), "input 'ids': Long [");

  auto norms = load_exported(data_file("norms.pt2"));
  EXPECT_TRUE(norms->named_buffers().contains("scale"));
  EXPECT_FALSE(norms->named_buffers().contains("offset"));  // not persistent, so absent from Python's state_dict too
  auto adapted = load_exported(data_file("adapted.pt2"));
  EXPECT_FALSE(adapted->named_parameters()["base.weight"].requires_grad());
  EXPECT_TRUE(adapted->named_parameters()["up.weight"].requires_grad());
}

TEST(ExportedModule, TakesInputsByPositionAndByName) {
  const Expected expected("decoder_meta");
  auto model = load_exported(data_file("decoder_meta.pt2"), {.weights = data_file("decoder_meta_weights.safetensors")});
  const at::Tensor ids = expected.at("input.ids"), labels = expected.at("input.labels");
  expect_close(model->forward(ids, labels)["loss"].tensor(), expected.at("loss"), "by position");
  expect_close((*model)(ids, NamedInputs{{"labels", labels}})["loss"].tensor(), expected.at("loss"), "both");
  auto refused = [&](auto&&... inputs) { return error_of<std::invalid_argument>([&] { model->forward(inputs...); }); };
  expect_contains(refused(ids), "input 'labels' is missing");
  expect_contains(refused(ids, NamedInputs{{"label", labels}}),
                  "no input 'label'; the model was exported with 'ids', 'labels'");
  expect_contains(refused(ids, NamedInputs{{"ids", ids}, {"labels", labels}}), "'ids' is given twice");
  expect_contains(refused(ids, labels, labels), "3 inputs are given");
  expect_contains(refused(ids, labels.to(at::kFloat)), "input 'labels' is Float, exported as Long");
  expect_contains(refused(ids.to(at::kByte), labels), "input 'ids' is Byte, exported as Long");
  expect_contains(refused(ids, labels[0]), "input 'labels' has 1 dimensions, exported with 2");
  expect_contains(refused(ids, 3), "input 'labels' is an integer, exported as a tensor");
  expect_contains(refused(ids, std::nullopt), "input 'labels' is None, exported as a tensor");
  expect_contains(refused(ids.narrow(1, 0, 3), labels),
                  "dimension 1 of input 'labels' is 6, but dimension 1 of input 'ids' is 3");
  expect_contains(refused(at::zeros({4, 17}, at::kLong), at::zeros({4, 17}, at::kLong)),
                  "dimension 1 of input 'ids' is 17, exported for 2 to 16");

  auto norms = load_exported(data_file("norms.pt2"));
  const at::Tensor x = Expected("norms").at("input.x");
  EXPECT_EQ(norms->forward(x)["rows"].to_int(), 6);
  EXPECT_EQ(norms->forward(x.narrow(0, 0, 2), NamedInputs{{"weight", std::nullopt}, {"times", 2}})["rows"].to_int(), 3);
  expect_contains(error_of<std::invalid_argument>([&] { norms->forward(x, NamedInputs{{"times", 3}}); }),
                  "input 'times' is 3; it was 2 when the model was exported");
  // Floating-point dtypes may differ, for mixed precision. An operator that refuses one names the input.
  expect_contains(error_of<c10::Error>([&] { norms->forward(x.to(at::kDouble)); }),
                  "input 'x' is Double, exported as Float");
  const ExportedValue parts = norms->forward(x)["parts"];
  EXPECT_TRUE(parts[1].is_none());
  EXPECT_EQ(parts[2].to_double(), 2.5);
  expect_contains(error_of<std::invalid_argument>([&] { parts[1].tensor(); }), "is None, expected a tensor");
}

TEST(ExportedModule, SwitchesModesByModule) {
  auto model = load_exported(data_file("norms.pt2"));
  auto modules = model->named_modules();
  EXPECT_TRUE(model->is_training());
  EXPECT_TRUE(modules["norm"]->is_training());
  EXPECT_FALSE(modules["frozen"]->is_training());  // as in Python
  const at::Tensor x = Expected("norms").at("input.x");
  auto buffer = [&](const char* name) { return model->named_buffers()[name].clone(); };
  const at::Tensor mean = buffer("frozen.running_mean"), count = buffer("norm.num_batches_tracked");
  model->forward(x);
  EXPECT_TRUE(at::equal(mean, buffer("frozen.running_mean")));
  EXPECT_EQ(buffer("norm.num_batches_tracked").item<int64_t>(), count.item<int64_t>() + 1);
  model->train();  // its own train() in Python leaves it unchanged
  model->forward(x);
  EXPECT_TRUE(at::equal(mean, buffer("frozen.running_mean")));
  model->eval();
  const at::Tensor before = buffer("norm.running_mean");
  model->forward(x);
  EXPECT_TRUE(at::equal(before, buffer("norm.running_mean")));
  EXPECT_EQ(buffer("norm.num_batches_tracked").item<int64_t>(), count.item<int64_t>() + 2);
  // A model exported in eval() can still be trained.
  auto evaluated = load_exported(data_file("norms_eval.pt2"));
  EXPECT_FALSE(evaluated->is_training());
  evaluated->train();
  const at::Tensor own = evaluated->named_buffers()["norm.running_mean"].clone();
  evaluated->forward(x);
  EXPECT_FALSE(at::equal(own, evaluated->named_buffers()["norm.running_mean"]));
}

// Python's eval() does not draw where the graph does, and its always-on dropout does not stop.
TEST(ExportedModule, ModesThatCannotBeSwitchedAreRefused) {
  auto model = load("random");
  const at::Tensor x = Expected("random").at("input.x");
  const auto error = [&] { return error_of<std::invalid_argument>([&] { model->forward(x); }); };
  EXPECT_EQ(error(), "");
  model->eval();
  expect_contains(error(), "the module 'path' (__main__.DropPath) is in eval(), and was exported in train()");
  model->named_modules()["path"]->train();
  const at::Tensor count = model->named_buffers()["norm.num_batches_tracked"].clone();
  const at::Tensor mean = model->named_buffers()["norm.running_mean"].clone();
  EXPECT_GT((model->forward(x).tensor() == 0).sum().item<int64_t>(), 0);  // `noise`
  EXPECT_TRUE(at::equal(mean, model->named_buffers()["norm.running_mean"]));
  EXPECT_TRUE(at::equal(count, model->named_buffers()["norm.num_batches_tracked"]));

  // Decomposed batch norm of eval().
  auto evaluated = load("norms_eval_decomposed");
  EXPECT_FALSE(evaluated->is_training());
  evaluated->train();
  expect_contains(error_of<std::invalid_argument>([&] { evaluated->forward(Expected("norms").at("input.x")); }),
                  "is in train(), and was exported in eval(), from which it cannot be switched");
}

// Python branched on sizes, which the graph does not contain.
TEST(ExportedModule, InputsForWhichPythonChoosesOtherwiseAreRefused) {
  auto model = load("guarded");
  const auto forward = [&](int64_t x, int64_t rows) {
    const auto y = ExportedValue::dict({{"rows", at::ones({rows, 4})}});
    return model->forward(at::ones({x, 4}), y);  // in the order of Python's forward(); the export had the reverse
  };
  const auto error = [&](int64_t x, int64_t rows) {
    return error_of<std::invalid_argument>([&] { forward(x, rows); });
  };
  EXPECT_EQ(error(6, 3), "");
  EXPECT_EQ(error(3, 2), "");
  expect_contains(error(3, 4), "exported for inputs with L['x'].size()[0] > L['y']['rows'].size()[0]");
  expect_contains(error(7, 4), "% 7) != 0");
  expect_contains(error(20, 9), "math.ceil");
  // Results of a class, and of a dictionary with defaults, keep their names.
  const ExportedValue parts = forward(5, 3);
  EXPECT_EQ(parts.items().size(), 2u);
  EXPECT_TRUE(at::allclose(parts["total"].tensor() * 3, parts["rows"]["a"][0].tensor()));
  EXPECT_EQ(parts["rows"]["b"][0].tensor().sizes(), (std::vector<int64_t>{5, 3}));
}

TEST(ExportedModule, ConvertsBuffersThatAreNotSaved) {
  auto model = load("norms_eval");
  model->to(at::kDouble);  // also converts its offset, or the sum would mix dtypes
  const at::NoGradGuard no_grad;
  const Expected expected("norms_eval");
  const at::Tensor y = model->forward(expected.at("input.x").to(at::kDouble))["y"].tensor();
  EXPECT_EQ(y.scalar_type(), at::kDouble);
  EXPECT_TRUE(at::allclose(y, expected.at("eval.0").to(at::kDouble), 1e-4, 1e-5));
}

// Values are freed after their last use, so an evaluation takes the memory of its widest point.
TEST(ExportedModule, FreesValuesAfterTheirLastUse) {
  const Expected expected("decoder_meta");
  auto model = load_exported(data_file("decoder_meta.pt2"), {.weights = data_file("decoder_meta_weights.safetensors")});
  const at::Tensor ids = at::randint(23, {8, 16}, at::kLong);
  auto peak_of = [&] {
    PeakMemory peak;
    model->forward(ids, ids);
    return peak.peak_bytes();
  };
  const int64_t with_graph = peak_of();
  const at::NoGradGuard no_grad;
  const int64_t without = peak_of();
  // At most 23 + 12 + 24 + 3 x 12 floats of each of 128 positions are alive. The graph keeps those of two blocks.
  EXPECT_LT(without, 128 * 4 * 140);
  EXPECT_LT(without * 2, with_graph);
}

TEST(ExportedModule, DifferentiatesTwiceThroughInputs) {
  const Expected expected("energy");
  auto model = load_exported(data_file("energy.pt2"));
  at::Tensor positions = expected.at("input.positions").clone().set_requires_grad(true);
  const at::Tensor energy = model->forward(positions).tensor();
  const at::Tensor forces =
      torch::autograd::grad({energy.sum()}, {positions}, {}, std::nullopt, /*create_graph=*/true)[0];
  forces.pow(2).sum().backward();
  const at::Tensor weight = model->named_parameters()["first.weight"];
  const at::Tensor analytic = weight.grad().clone();
  // Compares with finite differences of the forces.
  auto penalty = [&] {
    const at::Tensor again = positions.detach().clone().set_requires_grad(true);
    return torch::autograd::grad({model->forward(again).tensor().sum()}, {again})[0]
        .to(at::kDouble)
        .pow(2)
        .sum()
        .item<double>();
  };
  const at::NoGradGuard no_grad;
  at::Tensor entry = model->named_parameters()["first.weight"][3];
  auto with = [&](double change) {
    entry.add_(change);
    const at::AutoGradMode grad(true);
    const double value = penalty();
    const at::NoGradGuard inner;
    entry.sub_(change);
    return value;
  };
  const double difference = (with(1e-2) - with(-1e-2)) / 2e-2;
  EXPECT_NEAR(difference, analytic[3].item<double>(), 2e-2 * std::abs(difference) + 1e-3);
}

TEST(ExportedModule, SaysWhereAnOperatorFailed) {
  auto model = load_exported(data_file("decoder_meta.pt2"), {.weights = data_file("decoder_meta_weights.safetensors")});
  const at::Tensor ids = at::full({4, 6}, 1000, at::kLong);
  const std::string error = error_of<c10::Error>([&] { model->forward(ids, ids); });
  expect_contains(error, "torch.ops.aten.embedding.default");
  expect_contains(error, "sparse.py:");
}

}  // namespace
}  // namespace tessera::exported_test
