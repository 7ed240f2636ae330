#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/paging/page.h"

namespace c10 {
class OperatorHandle;
}

// What the files of paging share about the views of pages.
namespace tessera::internal {

// libtorch keeps this key for wrappers with a boxed fallback and does not use it itself. The one
// place where it is named.
#define TESSERA_PAGED_KEY TESTING_ONLY_GenericWrapper
constexpr auto kPagedKey = c10::DispatchKey::TESSERA_PAGED_KEY;

// Of the page that a paged tensor is a view of; null if its storage has become another.
Page::State* page_state_of(const at::Tensor& view);

// The current stream of a device, as a number.
inline int64_t current_stream_on(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// Calls an operator with what stand-ins compute in the place of theirs.
void call_with_stand_ins(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::internal
