#include "examples/common/precision.h"

#include <torch/cuda.h>

#include <boost/program_options/value_semantic.hpp>

#include "examples/common/option_checks.h"

namespace examples {
namespace po = boost::program_options;

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kFloat:
      return "fp32";
    case Precision::kBFloat16:
      return "bf16";
    case Precision::kHalf:
      return "fp16";
  }
  return "?";
}

namespace {

DeviceKind parse_device(const std::string& name) {
  if (name == "auto") return DeviceKind::kAuto;
  if (name == "cpu") return DeviceKind::kCpu;
  if (name == "cuda") return DeviceKind::kCuda;
  throw OptionsError("--device must be auto, cpu or cuda, got '" + name + "'");
}

Precision parse_precision(const std::string& name) {
  for (const auto precision : {Precision::kFloat, Precision::kBFloat16, Precision::kHalf}) {
    if (name == name_of(precision)) return precision;
  }
  throw OptionsError("--dtype must be fp32, bf16 or fp16, got '" + name + "'");
}

}  // namespace

std::optional<at::Device> ComputeOptions::device_of_ranks() const {
  const bool uses_gpu = device == DeviceKind::kCuda || (device == DeviceKind::kAuto && torch::cuda::is_available());
  return uses_gpu ? std::optional<at::Device>(at::kCUDA) : std::nullopt;
}

void describe_device(po::options_description& description, ComputeOptions& options) {
  description.add_options()("device",
                            po::value<std::string>()->default_value("auto")->value_name("KIND")->notifier(
                                [&options](const std::string& name) { options.device = parse_device(name); }),
                            "auto: a GPU for each rank if there is one, else cpu; cpu; cuda");
}

void describe_precision(po::options_description& description, ComputeOptions& options) {
  description.add_options()(
      "dtype", po::value<std::string>()->value_name("TYPE")->notifier([&options](const std::string& name) {
        options.precision = parse_precision(name);
      }),
      "of forward and backward: fp32, bf16 or fp16 (with a scaled loss); parameters and optimizer stay in fp32; "
      "default: bf16 on a GPU, else fp32");
}

std::string describe(const std::string& device, Precision precision) {
  return device + ", " + name_of(precision) + (precision == Precision::kFloat ? "" : ", parameters and optimizer fp32");
}

Mixed::Mixed(Precision precision, const std::shared_ptr<tessera::Communicator>& comm, bool autocasts)
    : device_(comm->device().type()), autocasts_(autocasts) {
  if (precision != Precision::kFloat) dtype_ = precision == Precision::kHalf ? at::kHalf : at::kBFloat16;
  if (precision == Precision::kHalf) scaler_.emplace(comm);
}

tessera::MixedPrecision Mixed::of_units() const {
  if (!dtype_) return {};
  return {.param_dtype = dtype_, .reduce_dtype = at::kFloat};
}

}  // namespace examples
