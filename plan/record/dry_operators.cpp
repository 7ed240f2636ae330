#include "plan/record/dry_operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/layout/tensor_signature.h"
#include "core/paging/boxed_tensors.h"
#include "core/paging/residency.h"
#include "plan/calibrate/processor_time.h"
#include "plan/record/recorder.h"
#include "plan/record/shape_rules.h"

namespace tessera::internal {

// A dispatch key below autograd that libtorch reserves for torchdistX and does not use. Only this macro names the key.
#define TESSERA_RECORDING_KEY Fake
static constexpr auto kRecordingKey = c10::DispatchKey::TESSERA_RECORDING_KEY;

namespace {

constexpr int64_t kMostBytesRun = int64_t{32} << 20;  // maximum size of the arguments of an operator run on zeros

enum class How : uint8_t {
  kThrough,  // not recorded: a view, an operator on metadata, or a composite operator (its parts are recorded)
  kKernel,   // computes tensors
  kValue,    // returns a value to the host
  kShape,    // returns tensors whose shapes depend on values
};

struct Traits {
  How how = How::kThrough;
  std::string name;  // operator name, with the overload name if there is one
  bool has_meta_kernel = false;
  bool is_mutable = false;
  bool has_flop = false;
  bool may_transpose = false;  // true for a composite operator that is a kernel only if argument `transposed` is true
  std::vector<bool> writes;    // whether the operator writes to each argument
};

// Operators that are registered as composite, but compute directly in memory like a kernel.
const std::unordered_set<std::string> kKernelsAtHeart = {
    "aten::copy_", "aten::mkldnn_convolution", "aten::convolution_backward", "aten::_nnpack_spatial_convolution"};
// Operators that have CPU kernels, but only read or change metadata.
const std::unordered_set<std::string> kMetadata = {"aten::set_", "aten::resize_", "aten::_fused_sdp_choice",
                                                   "aten::is_set_to", "aten::_reshape_alias"};
const std::unordered_set<std::string> kValues = {"aten::_local_scalar_dense", "aten::equal"};
const std::unordered_set<std::string> kShapes = {"aten::nonzero",
                                                 "aten::masked_select",
                                                 "aten::_unique",
                                                 "aten::_unique2",
                                                 "aten::unique_dim",
                                                 "aten::bincount",
                                                 "aten::histc",
                                                 "aten::unique_consecutive",
                                                 "aten::repeat_interleave",
                                                 "aten::unique_dim_consecutive"};

Traits describe(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  Traits traits;
  traits.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  traits.has_meta_kernel = op.hasKernelForDispatchKey(c10::DispatchKey::Meta);
  traits.has_flop = has_flop(traits.name);
  traits.may_transpose = traits.name == "aten::_convolution";
  bool is_view = false;
  for (const c10::Argument& result : schema.returns())
    is_view = is_view || (result.alias_info() != nullptr && !is_written_to(result));
  for (const c10::Argument& argument : schema.arguments()) {
    traits.writes.push_back(is_written_to(argument));
    traits.is_mutable = traits.is_mutable || traits.writes.back();
  }
  if (kValues.contains(schema.name())) {
    traits.how = How::kValue;
  } else if (kShapes.contains(schema.name())) {
    traits.how = How::kShape;
  } else if (!is_view && !kMetadata.contains(schema.name()) &&
             (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || kKernelsAtHeart.contains(schema.name()))) {
    traits.how = How::kKernel;
  }
  return traits;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Traits> known;
  const auto [entry, is_new] = known.try_emplace(&op.schema());
  if (is_new) entry->second = describe(op);
  return entry->second;
}

// Calls visit(tensor, index in `values`) for every tensor in `values`, including the tensors in lists.
template <class Visit>
void for_each_tensor(at::ArrayRef<c10::IValue> values, Visit visit) {
  for (size_t i = 0; i < values.size(); ++i)
    for_each_boxed_tensor(values[i], [&](const at::Tensor& tensor) { visit(tensor, i); });
}

std::vector<at::Tensor> tensors_of(at::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(values, [&](const at::Tensor& tensor, size_t) { tensors.push_back(tensor); });
  return tensors;
}

std::vector<c10::IValue> meta_arguments(at::ArrayRef<c10::IValue> arguments) {
  std::vector<c10::IValue> result(arguments.begin(), arguments.end());
  for (c10::IValue& value : result)
    replace_boxed_tensors(value, [](const at::Tensor& tensor) { return tensor.defined() ? meta_of(tensor) : tensor; });
  return result;
}

at::Tensor without_values(const at::Tensor& meta, Recorder& recorder) {
  if (!meta.defined()) return meta;
  at::Tensor tensor;
  const size_t bytes = meta.storage().nbytes();
  if (bytes > at::detail::computeStorageNbytes(meta.sizes(), meta.strides(), meta.element_size())) {
    // The result uses only a part of its memory, because the operator's kernel shrinks the result after the allocation.
    tensor = at::detail::empty_cpu({static_cast<int64_t>(bytes / meta.element_size())}, meta.scalar_type());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  } else {
    tensor = at::detail::empty_strided_cpu(meta.sizes(), meta.strides(), meta.scalar_type());
  }
  recorder.make_void(tensor);
  return tensor;
}

[[noreturn]] void refuse(const Traits& traits, const std::string& why) {
  throw std::invalid_argument("dry_run: " + traits.name + " " + why);
}

// Returns the operator's results on the meta device. Uses the shape rule if there is one, otherwise the meta kernel.
std::vector<c10::IValue> shapes_of(const c10::OperatorHandle& op, const Traits& traits,
                                   std::vector<c10::IValue> arguments) {
  if (const ShapeRule* rule = shape_rule_of(traits.name)) {
    std::vector<c10::IValue> results;
    for (at::Tensor& tensor : (*rule)(arguments)) results.emplace_back(std::move(tensor));
    return results;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &arguments);
  return arguments;
}

// Returns whether the operator must run on zeros to find its results' shapes. Throws if its arguments are too large.
bool is_run(const Traits& traits, at::ArrayRef<c10::IValue> arguments) {
  if (traits.has_meta_kernel || shape_rule_of(traits.name) != nullptr) return false;
  int64_t bytes = 0;
  for_each_tensor(arguments, [&](const at::Tensor& tensor, size_t) { bytes += static_cast<int64_t>(tensor.nbytes()); });
  if (bytes > kMostBytesRun)
    refuse(traits, "has neither a meta kernel in libtorch's C++ nor a rule of shapes here, and is given " +
                       std::to_string(bytes) + " bytes, more than the " + std::to_string(kMostBytesRun) +
                       " with which it would be run on zeros");
  return true;
}

// Advances the generator of a skipped random operator. checkpointed() detects random numbers by the generator's state.
void draw(const Traits& traits, const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() != "generator" && (i > 0 || traits.name != "aten::native_dropout")) continue;
    at::Generator generator =
        arguments[i].isGenerator() ? arguments[i].toGenerator() : at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    at::check_generator<at::CPUGeneratorImpl>(generator)->random();
  }
}

// Replaces the arguments on the stack by void results: written arguments, or new tensors. Resizes `out` tensors.
void skip(const c10::OperatorHandle& op, const Traits& traits, torch::jit::Stack& stack, Recorder& recorder) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  draw(traits, schema, arguments);
  bool needs_shapes = false;
  for (const c10::Argument& result : schema.returns()) needs_shapes = needs_shapes || result.alias_info() == nullptr;
  for (size_t i = 0; i < count; ++i)
    needs_shapes = needs_shapes || (traits.writes[i] && schema.arguments()[i].is_out());
  if (needs_shapes && is_run(traits, arguments)) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (const at::Tensor& made : tensors_of(torch::jit::last(stack, schema.returns().size())))
      recorder.make_void(made);
    return;
  }
  std::vector<c10::IValue> shapes;
  if (needs_shapes) shapes = shapes_of(op, traits, meta_arguments(arguments));
  torch::jit::drop(stack, count);
  for_each_tensor(arguments, [&](const at::Tensor& tensor, size_t i) {
    if (traits.writes[i] && !(schema.name() == "aten::_amp_foreach_non_finite_check_and_unscale_" && i == 1))
      recorder.make_void(tensor);  // excludes found_inf, whose value 0 means that no infinity was found
  });
  for (size_t result = 0; result < schema.returns().size(); ++result) {
    const auto* alias = schema.returns()[result].alias_info();
    if (alias != nullptr) {
      for (size_t i = 0; i < count; ++i) {
        const auto* given = schema.arguments()[i].alias_info();
        if (given == nullptr || given->beforeSets() != alias->beforeSets()) continue;
        at::Tensor tensor = arguments[i].toTensor();
        if (schema.arguments()[i].is_out() && result < shapes.size() && shapes[result].isTensor() &&
            tensor.sizes() != shapes[result].toTensor().sizes()) {
          tensor.resize_(shapes[result].toTensor().sizes());
          recorder.make_void(tensor);
        }
        stack.emplace_back(std::move(tensor));
      }
    } else {
      stack.push_back(shapes.at(result));
      replace_boxed_tensors(stack.back(), [&](const at::Tensor& shape) { return without_values(shape, recorder); });
    }
  }
}

// Pushes zero as the value that the host reads from void tensors, and records the read. As an exception, aten::equal of
// identical views pushes true without a record, because attention detects equal query, key and value by aten::equal.
void stand_in(const Traits& traits, torch::jit::Stack& stack, size_t count, Recorder& recorder) {
  if (traits.name == "aten::equal") {
    const at::Tensor one = torch::jit::peek(stack, 0, count).toTensor(),
                     other = torch::jit::peek(stack, 1, count).toTensor();
    if (one.is_alias_of(other) && one.scalar_type() == other.scalar_type() &&
        is_view_at(one, other.sizes(), other.strides(), other.storage_offset())) {
      torch::jit::drop(stack, count);
      return torch::jit::push(stack, true);
    }
  }
  recorder.read_value(traits.name);
  const at::ScalarType dtype = stack.back().isTensor() ? stack.back().toTensor().scalar_type() : at::kFloat;
  torch::jit::drop(stack, count);
  if (traits.name == "aten::equal") return torch::jit::push(stack, false);
  if (dtype == at::kBool) return torch::jit::push(stack, at::Scalar(false));
  torch::jit::push(stack, at::isIntegralType(dtype, false) ? at::Scalar(0) : at::Scalar(0.0));
}

// Marks large new floating-point tensors as void, so that later operators on them are skipped.
void mark_made(const std::vector<at::Tensor>& made, Recorder& recorder) {
  for (const at::Tensor& tensor : made)
    if (tensor.is_cpu() && at::isFloatingType(tensor.scalar_type()) && tensor.has_storage() &&
        static_cast<int64_t>(tensor.storage().nbytes()) > Recorder::kSmallBytes)
      recorder.make_void(tensor);
}

// The memory that an operator reads and writes, and the dtype of its first floating-point tensor.
struct Touched {
  int64_t bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int64_t selected_from = 0;  // size of an argument that the operator reads only in part
};

// Returns the bytes of a tensor's elements. Counts an element only once if a stride of 0 repeats the element.
int64_t touched_bytes(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return 0;
  auto bytes = static_cast<int64_t>(tensor.element_size());
  for (int64_t i = 0; i < tensor.dim(); ++i)
    bytes *= tensor.stride(i) == 0 ? std::min<int64_t>(tensor.size(i), 1) : tensor.size(i);
  return bytes;
}

// Operators that write to their first argument without reading it.
const std::unordered_set<std::string> kOverwriting = {"aten::copy_",   "aten::fill_",    "aten::zero_",
                                                      "aten::normal_", "aten::uniform_", "aten::random_"};
// Operators that read only some rows or elements of their first argument.
const std::unordered_set<std::string> kSelecting = {"aten::embedding", "aten::index_select", "aten::index",
                                                    "aten::gather", "aten::take"};
// Operators that allocate memory without writing to it.
const std::unordered_set<std::string> kUnwritten = {"aten::empty", "aten::empty_strided", "aten::empty_like",
                                                    "aten::new_empty", "aten::new_empty_strided"};

void note_dtype(Touched& touched, const at::Tensor& tensor) {
  if (touched.dtype == c10::ScalarType::Undefined && at::isFloatingType(tensor.scalar_type()))
    touched.dtype = tensor.scalar_type();
}

Touched touched_by_arguments(const c10::FunctionSchema& schema, const Traits& traits,
                             at::ArrayRef<c10::IValue> arguments) {
  Touched touched;
  if (traits.how == How::kValue) return touched;
  for_each_tensor(arguments, [&](const at::Tensor& tensor, size_t i) {
    note_dtype(touched, tensor);
    const int64_t bytes = touched_bytes(tensor);
    if (i == 0 && kSelecting.contains(schema.name())) {
      touched.selected_from = bytes;
      return;
    }
    const c10::Argument& argument = schema.arguments()[i];
    const bool is_read = !argument.is_out() && !(i == 0 && kOverwriting.contains(schema.name()));
    // Does not count writes to gradients. Fused optimizers declare them, but write only with a gradient scaler.
    const bool is_written = traits.writes[i] && argument.name() != "grads";
    touched.bytes += (is_read ? bytes : 0) + (is_written ? bytes : 0);
  });
  return touched;
}

// Adds the size of new results. Results that are arguments were already counted with the arguments.
void add_results(Touched& touched, const c10::FunctionSchema& schema, const Traits& traits,
                 const std::vector<at::Tensor>& made) {
  if (traits.is_mutable || kUnwritten.contains(schema.name())) return;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : made) {
    note_dtype(touched, tensor);
    bytes += touched_bytes(tensor);
  }
  touched.bytes += bytes + std::min(bytes, touched.selected_from);
}

struct Given {
  bool any_void = false, all_cpu = true;
};
// Returns whether any argument is void, and whether all are on the CPU. Sets the recorder's unit and module.
Given look_at(at::ArrayRef<c10::IValue> values, Recorder& recorder) {
  Given given;
  for_each_tensor(values, [&](const at::Tensor& tensor, size_t i) {
    given.all_cpu = given.all_cpu && tensor.device().is_cpu();
    given.any_void = given.any_void || (!recorder.has_data() && Recorder::is_void(tensor));
    if (Page* page = page_of(tensor)) recorder.set_unit(page->name());
    if (values[i].isTensor()) recorder.set_module_of(tensor);  // skips tensors in lists (of fused optimizers)
  });
  return given;
}

thread_local bool is_called = false;

void record_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRecordingKey);
  is_called = true;
  Recorder* recorder = Recorder::current();
  if (recorder == nullptr || Recorder::is_paused()) {
    c10::impl::ExcludeDispatchKeyGuard unseen(kRecordingKey);
    return op.redispatchBoxed(below, stack);
  }
  const Traits& traits = traits_of(op);
  const size_t count = op.schema().arguments().size();
  const auto [any_void, all_cpu] = look_at(torch::jit::last(*stack, count), *recorder);
  constexpr size_t kTransposed = 6;  // index of the argument `transposed` of aten::_convolution
  const bool computes =
      traits.how != How::kThrough || (traits.may_transpose && torch::jit::peek(*stack, kTransposed, count).toBool());
  if (!computes || !all_cpu) return op.redispatchBoxed(below, stack);

  c10::impl::ExcludeDispatchKeyGuard inside(kRecordingKey);
  if (any_void && traits.how == How::kShape)
    refuse(traits, "makes tensors whose shapes depend on values, and its arguments have none");
  std::vector<c10::IValue> arguments;
  Touched touched = touched_by_arguments(op.schema(), traits, torch::jit::last(*stack, count));
  if (traits.has_flop) {
    const auto last = torch::jit::last(*stack, count);
    arguments.assign(last.begin(), last.end());
  }
  recorder->begin_operator(traits.name);
  struct End {
    Recorder* recorder;
    const Touched& touched;
    int64_t flop = 0;
    double seconds = 0, processor_s = 0;
    ~End() { recorder->end_operator(flop, touched.bytes, touched.dtype, seconds, processor_s); }
  } end{recorder, touched};
  if (any_void && traits.how == How::kValue) return stand_in(traits, *stack, count, *recorder);
  const double processor_began_s = recorder->has_data() ? thread_processor_s() : 0;
  const double began_s = wall_clock_s();
  any_void ? skip(op, traits, *stack, *recorder) : op.redispatchBoxed(below, stack);
  if (recorder->has_data()) {
    end.seconds = wall_clock_s() - began_s;
    end.processor_s = thread_processor_s() - processor_began_s;
  }
  const std::vector<at::Tensor> made = tensors_of(torch::jit::last(*stack, op.schema().returns().size()));
  if (!any_void && !recorder->has_data()) mark_made(made, *recorder);
  add_results(touched, op.schema(), traits, made);
  if (traits.has_flop) end.flop = flop_of(traits.name, arguments, made);
}

TORCH_LIBRARY_IMPL(_, TESSERA_RECORDING_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&record_operator>());
}

}  // namespace

RecordedOperators::RecordedOperators() : included_(kRecordingKey) {
  is_called = false;
  at::AutoDispatchBelowADInplaceOrView quiet;
  at::neg(at::ones({1}));
  if (!is_called)
    throw std::runtime_error(
        "Tessera's fallback for the dispatch key Fake is not called: another library in this process uses the key, or "
        "this libtorch dropped it");
}

}  // namespace tessera::internal
