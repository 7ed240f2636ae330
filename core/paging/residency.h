#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/paging/page.h"

namespace tessera::internal {

// Who fills pages: called by the fallback, on the thread that runs the operator.
class Pager {
 public:
  virtual ~Pager() = default;
  // Makes all of `pages` resident; all are needed by one operator. May throw, and the operator's
  // caller sees it, in forward() and in backward() alike.
  virtual void use(const std::vector<Page*>& pages) = 0;
  // Before a write that the page does not allow: throws std::logic_error that names the parameter, or returns whether
  // it has done the operator's work (zero_()). If not, the operator goes on and leaves the page alone (set_()).
  virtual bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) = 0;
  // An operator, or one who called before_write(), is about to write to a page that was given away, or of which it is
  // told (Page::tell_of_writes): returns when nothing that is under way reads it any more.
  virtual void before_write(int /*id*/) {}
};

// What autograd does with an operator that is called now: records it in a forward (or will, when a checkpointed part is
// computed again), records it inside a backward, which computes a checkpointed part again, or does not record it, in a
// backward, which needs the values that forward used, or elsewhere, in an evaluation, which may have seen others.
Page::GradMode current_grad_mode();

// Throws std::runtime_error if another library has registered a fallback for our dispatch key.
void require_residency();

// Whether a tensor is a view of some page.
bool is_paged(const at::Tensor& tensor);
// For one who is about to write to a tensor by pointer: Pager::before_write(), if it is a view of such a page.
void before_write(const at::Tensor& tensor);
// For one who has written to a tensor by pointer: if it is a view of a page, tells those who have a copy of that.
void note_write(const at::Tensor& tensor);
// For an optimizer that steps a parameter: whether nothing of it is on this rank. It then counts as written, as where
// some of it is: ranks compare whether they have stepped.
bool note_write_if_empty(const at::Tensor& parameter);
// Whether it is a view of a page whose data nobody can fetch any more.
bool has_lost_its_pager(const at::Tensor& tensor);
// That page, or null; also while nobody keeps it filled any more.
Page* page_of(const at::Tensor& tensor);

}  // namespace tessera::internal
