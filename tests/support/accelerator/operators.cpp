// Operators on the simulated accelerator. Memory, copies and views are implemented here. All other operators run CPU
// kernels in the order of the current stream. An operator runs asynchronously if Meta kernels give its results' shapes,
// or if it only writes to its arguments. Otherwise, the host's thread waits for the arguments, and computes. This wait
// counts as a synchronisation only if the operator synchronises on a GPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <string>

#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/graphs.h"
#include "tests/support/accelerator/kernel_arguments.h"
#include "tests/support/accelerator/memory.h"
#include "tests/support/accelerator/streams.h"

namespace tessera::accelerator {
using namespace internal;

at::Tensor for_kernels(const at::Tensor& tensor) {
  return at::from_blob(kernel_address(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

Access access_of(const at::Tensor& tensor, bool writes) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin, writes};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.element_size(), writes};
}

namespace {

using c10::SymIntArrayRef;
using torch::jit::Stack;
using Sizes = c10::IntArrayRef;

// ---- memory and views -----------------------------------------------------------------------------

at::Tensor empty(Sizes sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::kCUDA));
  return at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::kCUDA));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, std::move(offset));
}
at::Tensor view(const at::Tensor& self, SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}
at::Tensor reshape_alias(const at::Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
const at::Tensor& resize(const at::Tensor& self, SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
at::Tensor& set_all(at::Tensor& self, at::Storage source, int64_t offset, Sizes sizes, Sizes strides) {
  return at::cpu::set_(self, std::move(source), offset, sizes, strides);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(self.storage().data_ptr(), stream);
}

// ---- copies ---------------------------------------------------------------------------------------

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const bool crosses = self.device() != source.device();
  const bool between_devices = crosses && self.is_cuda() && source.is_cuda();
  const int device = (source.is_cuda() ? source : self).device().index();
  const int stream = current_stream(device);
  if (crosses && recording_of(stream) != 0) refuse_while_recording(device, "a copy between host and device");
  if (between_devices) block(stream, record(current_stream(self.device().index())));
  launch(stream, "copy_", {access_of(source, false), access_of(self, true)},
         [from = for_kernels(source), to = for_kernels(self)] { to.copy_(from); });
  if (between_devices) block(current_stream(self.device().index()), record(stream));
  if (!crosses || between_devices) return self;
  const at::Tensor& host = self.is_cpu() ? self : source;
  if (non_blocking && is_pinned(host.const_data_ptr())) {
    const at::Device there = self.is_cpu() ? source.device() : self.device();
    pinned_allocator()->record_event(host.storage().mutable_data(), nullptr,
                                     c10::Stream(c10::Stream::UNSAFE, there, stream % kStreamsPerDevice));
  } else {
    synchronize(stream, self.is_cpu() ? "copy to the host" : "copy from pageable memory");
  }
  return self;
}

at::Scalar item(const at::Tensor& self) {
  const int stream = current_stream(self.device().index());
  at::Tensor value = at::empty({}, self.options().device(at::kCPU));
  launch(stream, "item", {access_of(self, false)}, [from = for_kernels(self).squeeze(), value] { value.copy_(from); });
  synchronize(stream, "item");
  return value.item();
}

// ---- all others -----------------------------------------------------------------------------------

const std::set<std::string> kSynchronise = {"aten::nonzero",
                                            "aten::masked_select",
                                            "aten::equal",
                                            "aten::_unique2",
                                            "aten::unique_dim",
                                            "aten::bincount",
                                            "aten::unique_consecutive",
                                            "aten::repeat_interleave",
                                            "aten::_linalg_check_errors"};

// Returns whether the operator calls nonzero(), as indexing by a mask does, except to write a number (masked_fill()).
bool is_indexed_by_mask(const std::string& name, const Stack& arguments) {
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  if (arguments.size() > 2 && arguments[2].isTensor() && arguments[2].toTensor().is_cpu() &&
      arguments[2].toTensor().numel() == 1)
    return false;
  for (const c10::IValue& argument : arguments)
    if (argument.isOptionalTensorList())
      for (const std::optional<at::Tensor>& index : argument.toOptionalTensorList())
        if (index && index->defined() && index->is_cuda() &&
            (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
          return true;
  return false;
}

// Returns the operator's results on the Meta device, which show their shapes; empty if it has no Meta kernel.
Stack on_meta(const c10::OperatorHandle& op, const KernelArguments& arguments) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return {};
  Stack stack = arguments.mapped([](const at::Tensor& tensor) {
    return tensor.is_cuda() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta))
                            : tensor;
  });
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {
    return {};
  }
  return stack;
}

at::Tensor room_like(const at::Tensor& tensor, at::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

// Runs an operator that returns new tensors: allocates the results, and launches a kernel that fills them.
Stack run_functional(const c10::OperatorHandle& op, const KernelArguments& arguments, int stream) {
  const auto& name = op.schema().name();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(device_of(stream)));
  Stack host = arguments.mapped(&for_kernels_or_copy);
  Stack shapes = arguments.draws() ? Stack() : on_meta(op, arguments);
  const bool are_on_meta = !shapes.empty();
  if (recording_of(stream) != 0 && shapes.empty()) {
    if (arguments.draws()) refuse_while_recording(device.index(), name + ", which returns random numbers");
    // Computes only shapes, from zeros: recorded arguments have no values yet, and a kernel may write to some of them.
    shapes = arguments.mapped([](const at::Tensor& tensor) {
      return tensor.is_cuda() ? at::zeros(tensor.sizes(), tensor.options().device(at::kCPU)) : tensor;
    });
    op.callBoxed(shapes);
  }
  const bool is_asynchronous = !shapes.empty();
  if (!is_asynchronous) {
    wait_in_secret(stream);
    op.callBoxed(host);
    shapes = host;
  }
  std::vector<at::Tensor> rooms;
  Stack results = mapped_tensors(shapes, [&](const at::Tensor& tensor) {
    return rooms.emplace_back(tensor.is_cpu() && are_on_meta ? tensor : room_like(tensor, device));
  });
  std::vector<Access> accesses = arguments.accesses();
  std::vector<at::Tensor> places;
  for (const at::Tensor& room : rooms) {
    accesses.push_back(access_of(room, true));
    places.push_back(for_kernels(room));
  }
  launch(stream, name, accesses, [op, host = std::move(host), places, is_asynchronous] {
    Stack values = host;
    if (is_asynchronous) op.callBoxed(values);
    size_t next = 0;
    mapped_tensors(values, [&](const at::Tensor& result) { return places[next++].copy_(result); });
  });
  return results;
}

// Runs an operator whose results are arguments that it writes.
void run_in_place(const c10::OperatorHandle& op, const KernelArguments& arguments, int stream) {
  arguments.resize_outputs([&] { return on_meta(op, arguments); });
  auto run = [op, host = arguments.mapped(&for_kernels_or_copy)] {
    Stack values = host;
    op.callBoxed(values);
  };
  if (arguments.draws())  // computes now, so that random numbers are drawn in the order of calls
    return launch_prepared(stream, op.schema().name(), arguments.accesses(), [run](int place) {
      wait_in_secret(place);
      run();
      return [] {};
    });
  launch(stream, op.schema().name(), arguments.accesses(), std::move(run));
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const KernelArguments arguments(schema, *stack);
  const int device = arguments.device().value_or(current_device());
  const int stream = current_stream(device);
  const auto given = torch::jit::last(*stack, schema.arguments().size());
  if (kSynchronise.contains(schema.name()) || is_indexed_by_mask(schema.name(), given.vec()))
    synchronize(stream, schema.name().c_str());
  torch::jit::drop(*stack, schema.arguments().size());
  const auto& returns = schema.returns();
  const bool writes =
      std::ranges::any_of(schema.arguments(), [](const auto& argument) { return is_written_to(argument); });
  TORCH_CHECK(writes || std::ranges::none_of(returns, [](const auto& result) { return result.alias_info(); }),
              "simulated accelerator: ", schema.name(), " returns a view, and has no kernel here");
  if (writes) {
    run_in_place(op, arguments, stream);
    for (c10::IValue& result : arguments.written_results()) stack->push_back(std::move(result));
  } else {
    for (c10::IValue& result : run_functional(op, arguments, stream)) stack->push_back(std::move(result));
  }
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  const at::Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Operators that libtorch implements only for devices.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  const auto input = (input_bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto hidden = (hidden_bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const at::Tensor reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  const at::Tensor candidate = (input[2] + reset * hidden[2]).tanh();
  return {candidate + update * (hx - candidate), at::cat({reset, update, candidate, hx, hidden[2]}, 1)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& gradient,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const at::Tensor &reset = kept[0], &update = kept[1], &candidate = kept[2], &hx = kept[3], &hidden = kept[4];
  const at::Tensor of_update = gradient * (hx - candidate) * (1 - update) * update;
  const at::Tensor of_candidate = gradient * (1 - update) * (1 - candidate * candidate);
  const at::Tensor of_reset = of_candidate * hidden * (1 - reset) * reset;
  const at::Tensor of_input = at::cat({of_reset, of_update, of_candidate}, 1);
  const at::Tensor of_hidden = at::cat({of_reset, of_update, of_candidate * reset}, 1);
  return {of_input, of_hidden, gradient * update, has_bias ? of_input.sum(0) : at::Tensor(),
          has_bias ? of_hidden.sum(0) : at::Tensor()};
}

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

ThreeTensors lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
                       const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor sum = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) sum = sum + *input_bias + *hidden_bias;
  const auto gates = sum.chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(),
                   out = gates[3].sigmoid();
  const at::Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}
ThreeTensors lstm_cell_backward(const std::optional<at::Tensor>& gradient_of_hy,
                                const std::optional<at::Tensor>& gradient_of_cy, const at::Tensor& cx,
                                const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  const auto or_zeros = [&](const std::optional<at::Tensor>& gradient) {
    return gradient && gradient->defined() ? *gradient : at::zeros_like(cy);
  };
  const auto kept = workspace.chunk(4, 1);
  const at::Tensor &in = kept[0], &forget = kept[1], &cell = kept[2], &out = kept[3];
  const at::Tensor of_hy = or_zeros(gradient_of_hy), squashed = cy.tanh();
  const at::Tensor of_cy = or_zeros(gradient_of_cy) + of_hy * out * (1 - squashed * squashed);
  const at::Tensor of_gates = at::cat({of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget),
                                       of_cy * in * (1 - cell * cell), of_hy * squashed * out * (1 - out)},
                                      1);
  return {of_gates, of_cy * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

// Returns false for operators that ask whether a library, absent here, supports an operation.
void say_no(const c10::OperatorHandle& op, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(false);
}

void register_kernels(torch::Library& library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", &resize);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_all);
  library.impl("record_stream", &record_stream);
  library.impl("copy_", &copy);
  library.impl("_local_scalar_dense", &item);
  library.impl("native_dropout", &native_dropout);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  for (const char* choice :
       {"_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"})
    library.impl(choice, torch::CppFunction::makeFromBoxedFunction<&say_no>());
  // Operators that have kernels besides a decomposition have a kernel on GPUs. Uses the CPU's kernel for these, which
  // gives equal numbers and one launch.
  const std::set<std::string> here = {"aten::copy_", "aten::empty", "aten::native_dropout"};
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || name.getNamespace() != "aten" || here.contains(name.name)) continue;
    const bool is_foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    const bool is_decomposed = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                               op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    // The decomposition writes to an argument whose shape is only known in the kernel.
    const bool is_opaque = (name.name == "aten::abs" || name.name == "aten::logical_not") && name.overload_name.empty();
    // These operators select kernels by the device, and some kernels exist only in a GPU's library.
    const bool is_choice = name.name == "aten::convolution" || name.name == "aten::convolution_backward";
    if (is_decomposed && (is_foreach || is_opaque || is_choice || op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))
      library.impl((name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

// Registers as TORCH_LIBRARY_IMPL does, unless kernels of real GPUs are loaded.
const bool are_registered = [] {
  if (on_gpus()) return false;
  static torch::Library all(torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__),
      aten(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
  register_kernels(aten);
  return true;
}();

}  // namespace
}  // namespace tessera::accelerator
