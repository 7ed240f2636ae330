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

// The dispatch key of views of pages. libtorch reserves this key for wrappers with a boxed fallback, and does not use
// it. Code must refer to the key by these two names only.
#define TESSERA_PAGED_KEY TESTING_ONLY_GenericWrapper
constexpr auto kPagedKey = c10::DispatchKey::TESSERA_PAGED_KEY;

// Returns the state of a view's page; null if the view's storage was replaced.
Page::State* page_state_of(const at::Tensor& view);

// Returns the id of a device's current stream.
inline int64_t current_stream_on(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// Whether the operator neither reads nor writes the data of its tensor arguments.
bool is_metadata_only(const c10::FunctionSchema& schema);

// Whether a result may be a view of an argument.
bool returns_views(const c10::FunctionSchema& schema);

// Whether the operator is set_(source) on a view of a page, and the source has another dtype. torch::load() calls
// set_(). On a parameter that is cast for use, set_() would reinterpret the source's bytes in the parameter's dtype.
bool sets_another_dtype(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Calls an operator that has stand-ins among its arguments. Passes their values, unless a stand-in computes the result.
void call_with_stand_ins(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::internal
