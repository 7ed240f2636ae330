#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/paging/page.h"

namespace tessera::internal {

// Fills pages. Called by the fallback, on the thread that runs the operator.
class Pager {
 public:
  virtual ~Pager() = default;
  // Fills all of `pages`, which one operator needs. Exceptions reach the operator's caller, in forward() and in
  // backward().
  virtual void use(const std::vector<Page*>& pages) = 0;
  // Called before a write that the page forbids. Throws std::logic_error, naming the parameter, or returns whether it
  // did the operator's work (zero_()). If not, the operator runs without touching the page (set_()).
  virtual bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) = 0;
  // An operator, or one who called before_write(), is about to write to a page that was given away, or of which it is
  // told (Page::tell_of_writes): returns when nothing that is under way reads it any more.
  virtual void before_write(int /*id*/) {}
};

// How autograd treats the current operator. It records a forward; in a checkpointed forward backward will record it; in
// a backward it records a recomputed part. Unrecorded operators run in a backward, which needs the values of forward,
// or in an evaluation, which may have used other values.
Page::GradMode current_grad_mode();

// Throws std::runtime_error if another library has registered a fallback for our dispatch key.
void require_residency();

// Whether a tensor is a view of a page.
bool is_paged(const at::Tensor& tensor);
// Must be called before a write by pointer. Calls Pager::before_write() if the tensor is a view of such a page.
void before_write(const at::Tensor& tensor);
// Must be called after a write by pointer. If the tensor is a view of a page, holders of copies of the page are told.
void note_write(const at::Tensor& tensor);
// For an optimizer that steps a parameter: returns whether this rank has no element of it. The step then counts as a
// write, as on ranks that have elements: ranks compare whether they have stepped.
bool note_write_if_empty(const at::Tensor& parameter);
// Whether the tensor is a view of a page whose pager is destroyed.
bool has_lost_its_pager(const at::Tensor& tensor);
// The page of a view; null for other tensors. Also returns a page whose pager is destroyed.
Page* page_of(const at::Tensor& tensor);

}  // namespace tessera::internal
