#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/runtime/thread_scope.h"

namespace tessera::internal {

class Pager;
class StandIn;

// A storage whose memory can be freed and attached again, and the tensors that view the storage.
//
// While the page is detached, its storage object stays but has 0 bytes, so module members and saved tensors stay valid.
// attach() fills the storage in place, for all views. Each view carries an additional dispatch key. Views of views and
// saved tensors inherit the key, but results of operators do not. The key's boxed fallback runs above autograd, before
// each operator that has a view as an argument, and calls the Pager. Other operators are not affected.
class Page {
 public:
  // `pager` must exist until detach_pager() is called. `id` identifies the page in calls to the pager. `name` is for
  // errors: "unit 'blocks.3'".
  Page(Pager* pager, int id, std::string name, at::Device device);
  ~Page();
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  int id() const { return id_; }
  const std::string& name() const { return state_->name; }
  Pager* pager() const { return state_->pager.load(); }
  bool holds(const at::Tensor& view) const;  // whether `view` is a view of this storage

  // Returns a view of the storage, also while the storage is empty. Autograd does not record the view.
  at::Tensor view(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t storage_offset) const;

  // Makes the storage use the memory of `buffer`. The page owns the buffer until detach().
  void attach(at::Tensor buffer);
  // Empties the storage, and returns its buffer.
  at::Tensor detach();
  bool is_attached() const { return buffer_.defined(); }
  const at::Tensor& buffer() const { return buffer_; }

  // Makes later uses of a view throw std::logic_error, unless the page is attached permanently. Must be called before
  // the pager is destroyed.
  void detach_pager() { state_->pager = nullptr; }

  // Sets whether operators may write to the views. If false, a write calls Pager::refuse() first.
  void set_writable(bool writable) { state_->writable = writable; }
  bool is_writable() const { return state_->writable; }
  // Makes each later write call pager.before_write(id) first. `pager` must live until detach_pager() is called.
  void tell_of_writes(Pager& pager, int id) { state_->write_listener = {&pager, id}; }

  // Returns the number of writes by operators and by note_write(), which counts a write by pointer.
  uint32_t writes() const { return state_->writes.load(); }
  void note_write() { ++state_->writes; }

  // How autograd treats an operator: see current_grad_mode(). An operator in the mode of the page's last use finds the
  // page attached, and does not call the pager. Most operators take this path.
  enum class GradMode : uint8_t { kNone, kRecording, kNotRecording, kRecomputing, kInBackward };
  // Sets the mode of the page's last use. On a device, the mode holds only for operators on the current stream.
  void set_current(GradMode mode);

  // Makes operators on views of this page convert arguments of dtype `from` to the views' dtype, and results back.
  // Operators that write or return views do not convert. Used for full_precision units under mixed precision.
  void convert_activations(at::ScalarType from) { state_->activations = from; }

  // Attaches memory permanently, also for views that outlive the page. From then on, only writes call the pager.
  void attach_permanently(at::Tensor buffer);

  // Marks this page as a copy of `source`. A write to `source` makes the copy stale until accept_writes(). The next use
  // of a stale page calls the pager. Version counters would miss writes through .data(), as by torch's SGD.
  void watch_writes(const Page& source) {
    state_->source.state = source.state_;
    accept_writes();
  }
  bool is_stale() const { return state_->is_stale(); }
  void accept_writes() {
    if (auto& source = state_->source; source.state) source.seen_writes = source.state->writes.load();
  }

  // The state of a page. The storage shares its ownership, so the state may outlive the page.
  struct State {
    std::atomic<Pager*> pager;
    Page* page = nullptr;
    std::string name;
    at::Device device = at::kCPU;
    bool writable = false;
    at::Tensor permanent;
    bool is_always_there() const { return permanent.defined(); }
    std::atomic<uint32_t> writes = 0;
    std::optional<at::ScalarType> activations;
    struct Current {
      std::atomic<GradMode> mode = GradMode::kNone;
      std::atomic<int64_t> stream = 0;
    } current;
    struct Listener {
      Pager* pager = nullptr;
      int id = 0;
    } write_listener;
    struct Substitute {
      std::shared_ptr<StandIn> values;  // set by stand_in_view(); the storage then has no page
      bool is_transposed = false;       // whether the tensor is the transpose of `values`
    } stand_in;
    struct Source {
      std::shared_ptr<State> state;
      uint32_t seen_writes = 0;
    } source;
    bool is_stale() const {
      return source.state && source.state->writes.load(std::memory_order_relaxed) != source.seen_writes;
    }
  };

 private:
  void set_data(void* data, size_t bytes);

  const int id_;
  std::shared_ptr<State> state_;
  c10::Storage storage_;
  at::Tensor buffer_;
};

// Attaches pages when operators need them. The boxed fallback calls the pager, on the thread that runs the operator.
class Pager {
 public:
  virtual ~Pager() = default;
  // Must attach `pages`, which one operator needs. Exceptions propagate to the operator's caller. The result, which may
  // be null, is destroyed when the operator ends.
  virtual std::shared_ptr<void> use(const std::vector<Page*>& pages) = 0;
  // Called before a write to a read-only page. Throws std::logic_error, naming the parameter, to refuse. Returns true
  // if this call did the operator's work (zero_()), and false if the operator replaces the storage (set_()).
  virtual bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) = 0;
  // Called before an operator, or a caller of internal::before_write(), writes to a page that was attached permanently
  // or on which tell_of_writes() was called. Must block until no operation in flight reads the page.
  virtual void before_write(int /*id*/) {}
};

// While an object of this class exists, this thread runs the first forward of a checkpointed() call. Autograd does not
// record this forward. Backward recomputes the forward with recording, so that its parameters get gradients.
class RecomputesLater : public ThreadCondition<RecomputesLater> {};

// Returns the purpose of an operator that this thread calls now:
//   kRecording     forward: recorded by autograd, or (checkpointed()) recomputed by backward later
//   kRecomputing   recorded in a part of forward that backward recomputes now
//   kInBackward    not recorded, in backward: needs the values of forward
//   kNotRecording  not recorded, outside backward: an evaluation, whose values may differ from those of forward
Page::GradMode current_grad_mode();

// Throws std::runtime_error if operators do not reach Tessera's fallback. Also makes torch::save() refuse empty pages.
void require_residency();

// Whether a tensor has the dispatch key of views of pages. Also true for stand_in_view().
bool is_paged(const at::Tensor& tensor);
// Must be called before a write by pointer. Calls Pager::before_write() if the tensor's page reports writes.
void before_write(const at::Tensor& tensor);
// Must be called after a write by pointer. If the tensor is a view of a page, copies of the page become stale.
void note_write(const at::Tensor& tensor);
// Used by an optimizer's step. If this rank has no element of the parameter, counts a write and returns true; otherwise
// returns false. Other ranks count a write when they step, and ranks later compare whether a step took place.
bool note_write_if_empty(const at::Tensor& parameter);
// Whether the tensor is a view of a page that has no pager and is not attached permanently.
bool has_lost_its_pager(const at::Tensor& tensor);
// Returns the page of a view; null for other tensors, and after the page's detach_pager().
Page* page_of(const at::Tensor& tensor);

}  // namespace tessera::internal
