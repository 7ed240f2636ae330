#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace tessera::internal {

class Pager;
class StandIn;

// A storage that is empty until somebody needs it, and the tensors that are views of it.
//
// The storage object lives on with 0 bytes while its unit is sharded, so that module members and tensors saved for
// backward keep pointing at it; lend() fills it in place for all of them. Each view carries one more dispatch key,
// which views of views and saved tensors inherit and results of operators do not. A boxed fallback registered for that
// key sees every operator that is given such a tensor, above autograd, and calls the Pager before the operator runs.
// Operators without such tensors are dispatched as ever.
class Page {
 public:
  // `pager` must outlive the page's detach(). `id` is the pager's own; `name` is for errors: "unit 'blocks.3'".
  Page(Pager* pager, int id, std::string name, at::Device device);
  ~Page();
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  int id() const { return id_; }
  const std::string& name() const { return state_->name; }
  Pager* pager() const { return state_->pager.load(); }
  bool holds(const at::Tensor& view) const;  // whether `view` is a view of this storage

  // A view of the storage with the given geometry, empty of data now. Not part of autograd.
  at::Tensor view(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t storage_offset) const;

  // The storage gets the buffer's memory; the page keeps the buffer alive until take_back().
  void lend(at::Tensor buffer);
  // The storage is empty again. Returns the buffer.
  at::Tensor take_back();
  bool is_lent() const { return buffer_.defined(); }
  const at::Tensor& buffer() const { return buffer_; }

  // From now on every use of a view throws std::logic_error: the pager goes away.
  void detach() { state_->pager = nullptr; }

  // Whether operators may write to the views; they throw std::logic_error otherwise.
  void set_writable(bool writable) { state_->writable = writable; }
  bool is_writable() const { return state_->writable; }
  // From now on `pager` hears of writes before they happen, by an id of its own: Pager::before_write(). It must outlive
  // the page's detach().
  void tell_of_writes(Pager& pager, int id) { state_->told_of_writes = &pager, state_->id_told = id; }

  // How often an operator was given a view to write to, or note_write() was called for one who writes by pointer.
  uint32_t writes() const { return state_->writes.load(); }
  void note_write() { ++state_->writes; }

  // What autograd does with an operator: see current_grad_mode(). While it is `mode`, uses of this page's views do not
  // reach the pager: the page is lent and was the last one used. This is the path of most operators.
  enum class GradMode : uint8_t { kNone, kRecording, kNotRecording, kRecomputing, kInBackward };
  // On a device it holds for operators on the stream that is current now.
  void set_current(GradMode mode);

  // Operators on views of this page get arguments of dtype `from` converted to the views' own, and their results
  // converted back: a unit that is not cast among units that are.
  void convert_activations(at::ScalarType from) { state_->activations = from; }

  // Lends for good: the data are always there, also for views that outlive the page. The pager hears of no use, only
  // of writes.
  void give_away(at::Tensor buffer);

  // Uses are reported again after the next write to `source`, the page of what this one is a copy of. (Version
  // counters would not do: torch's SGD writes through .data(), which has a counter of its own.)
  void watch_writes(const Page& source) {
    state_->source = source.state_;
    accept_writes();
  }
  bool is_stale() const { return state_->is_stale(); }
  void accept_writes() { state_->seen_writes = state_->source ? state_->source->writes.load() : 0; }

  // What the storages point to; shared with them, since they may outlive the page.
  struct State {
    std::atomic<Pager*> pager;
    Page* page = nullptr;
    std::string name;
    std::atomic<GradMode> current = GradMode::kNone;
    std::atomic<int64_t> current_stream = 0;  // for which it is
    at::Device device = at::kCPU;
    bool writable = false;
    at::Tensor given_away;
    bool is_always_there() const { return given_away.defined(); }
    Pager* told_of_writes = nullptr;
    int id_told = 0;
    std::atomic<uint32_t> writes = 0;
    std::optional<at::ScalarType> activations;
    std::shared_ptr<StandIn> stand_in;  // see stand_in_view(): the storage has no page any more
    std::shared_ptr<State> source;
    uint32_t seen_writes = 0;
    bool stands_transposed = false;  // of a stand-in: for the transpose of what it computes
    bool is_stale() const { return source && source->writes.load(std::memory_order_relaxed) != seen_writes; }
  };

 private:
  at::DataPtr pointer_to(void* data, at::Device device) const;
  void set_data(void* data, size_t bytes);

  const int id_;
  std::shared_ptr<State> state_;
  c10::Storage storage_;
  at::Tensor buffer_;
};

}  // namespace tessera::internal
