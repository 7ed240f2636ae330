#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/paging/residency.h"

namespace c10 {
class OperatorHandle;
}

// Declarations that the files of this folder share.
namespace tessera::internal {

// The dispatch key of views. libtorch reserves it for wrappers with a boxed fallback and does not use it. No other file
// names it.
#define TESSERA_PAGED_KEY TESTING_ONLY_GenericWrapper
constexpr auto kPagedKey = c10::DispatchKey::TESSERA_PAGED_KEY;

// The state of the page of a view; null if the view's storage was replaced.
Page::State* page_state_of(const at::Tensor& view);

// The current stream of a device, as a number.
inline int64_t current_stream_on(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// Whether the operator uses no data of its tensor arguments.
bool is_metadata_only(const c10::FunctionSchema& schema);

// Whether a result may be a view of an argument.
bool returns_views(const c10::FunctionSchema& schema);

// Whether the operator is set_(source) on a view of a page, by a tensor of another dtype. torch::load() calls it. On a
// parameter that is cast for use, set_() would keep the parameter's dtype but use bytes of another dtype.
bool sets_another_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Calls an operator with the values of stand-ins in place of the stand-ins.
void call_with_stand_ins(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::internal
