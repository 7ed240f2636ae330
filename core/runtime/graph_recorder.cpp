#include "core/runtime/graph_recorder.h"

#include <array>
#include <atomic>
#include <limits>
#include <stdexcept>

namespace tessera::internal {
namespace {

std::atomic<GraphRecorderFactory> chosen_factory = nullptr;

// Returns the variable that holds the device's CapturedWork; its value is null if there is none.
std::atomic<CapturedWork*>& work_on(c10::Device device) {
  static std::array<std::atomic<CapturedWork*>, std::numeric_limits<c10::DeviceIndex>::max() + 1> of_devices{};
  return of_devices.at(device.index());
}

}  // namespace

std::unique_ptr<GraphRecorder> make_graph_recorder() {
  const GraphRecorderFactory factory = chosen_factory;
  auto recorder = factory != nullptr ? factory() : make_cuda_graph_recorder();
  if (!recorder)
    throw std::invalid_argument(
        "CapturedStep: CUDA graphs are not in this build of Tessera: configure with -DTESSERA_CUDA=ON (preset cuda)");
  return recorder;
}

void set_graph_recorder_factory(GraphRecorderFactory factory) { chosen_factory = factory; }

CapturedWork::CapturedWork(c10::Device device, bool is_recording, const std::vector<at::Tensor>& leaves, Passes& passes)
    : device_(device), is_recording_(is_recording), passes_(passes) {
  for (const at::Tensor& leaf : leaves) leaves_.insert(leaf.unsafeGetTensorImpl());
  CapturedWork* none = nullptr;
  if (!work_on(device_).compare_exchange_strong(none, this))
    throw std::logic_error("CapturedStep: a step inside another captured step on " + device.str());
}

CapturedWork::~CapturedWork() { work_on(device_) = nullptr; }

CapturedWork* CapturedWork::running_on(c10::Device device) {
  return device.is_cuda() ? work_on(device).load() : nullptr;
}

CapturedWork* CapturedWork::recording_on(c10::Device device) {
  CapturedWork* const work = running_on(device);
  return work != nullptr && work->is_recording_ ? work : nullptr;
}

void CapturedWork::note_use(c10::Device device, const std::shared_ptr<BackwardPass>& pass) {
  if (CapturedWork* const work = running_on(device)) work->passes_.insert(pass);
}

void CapturedWork::require_own(const at::Tensor& leaf, const std::function<std::string()>& label) {
  const CapturedWork* const work = running_on(leaf.device());
  if (work != nullptr && !work->leaves_.contains(leaf.unsafeGetTensorImpl()))
    refuse(leaf.device(), "a gradient of " + label() + ", which another wrapper trains,",
           "freeze that wrapper's parameters before the call, by requires_grad_(false)");
}

at::Tensor CapturedWork::take_numbers(int64_t count) {
  at::Tensor taken = numbers_.narrow(0, 0, count);
  numbers_ = numbers_.narrow(0, count, numbers_.numel() - count);
  return taken;
}

void CapturedWork::refuse(c10::Device device, const std::string& what, const std::string& instead) {
  if (running_on(device) != nullptr)
    throw std::invalid_argument("CapturedStep on " + device.str() + ": " + what + " cannot be captured: " + instead);
}

}  // namespace tessera::internal
