#include <tessera/distributed_sampler.h>

#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <variant>

#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

// Returns a random number in [0, bound). Takes a remainder, because std::uniform_int_distribution differs between
// standard libraries. The bias of the remainder is at most bound / 2^64, which is negligible.
int64_t draw(std::mt19937_64& random, int64_t bound) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
}

// Upper limits of the items in one step and of the items before an epoch, so that sums of positions do not overflow.
constexpr int64_t kMostItems = int64_t{1} << 40, kMostTaken = int64_t{1} << 62;

void require_range(int64_t value, const char* name, int64_t least, int64_t most = std::numeric_limits<int64_t>::max()) {
  require(value >= least, name, " is ", value, ", expected ", least, " or more");
  require(value <= most, name, " is ", value, ", expected at most ", most);
}

}  // namespace

EpochOrder::EpochOrder(int64_t items_numel, uint64_t seed, bool shuffle)
    : items_numel_(items_numel), seed_(seed), shuffle_(shuffle) {
  require_range(items_numel, "items_numel", 1);
}

void EpochOrder::prepare(int64_t epoch, int64_t bound) {
  if (epoch == epoch_ && bound == bound_) return;
  std::seed_seq mixed{static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32), static_cast<uint32_t>(epoch),
                      static_cast<uint32_t>(static_cast<uint64_t>(epoch) >> 32)};
  std::mt19937_64 random(mixed);
  drawn_ = draw(random, bound);
  order_.resize(static_cast<size_t>(items_numel_));
  std::iota(order_.begin(), order_.end(), 0);
  for (int64_t i = items_numel_ - 1; shuffle_ && i > 0; --i) std::swap(order_[i], order_[draw(random, i + 1)]);
  epoch_ = epoch;
  bound_ = bound;
}

int64_t EpochOrder::item(int64_t place) {
  require_range(place, "place", 0);
  prepare(place / items_numel_, bound_);
  return order_[place % items_numel_];
}

int64_t EpochOrder::draw_of_epoch(int64_t epoch, int64_t bound) {
  require_range(bound, "bound", 1);
  prepare(epoch, bound);
  return drawn_;
}

// The position that a sampler and its copies share: the loop's next batch, and the next batch that a loader requests.
struct DistributedSampler::Position {
  struct Cursor {
    int64_t first = 0;  // place of the step's first item in EpochOrder
    int64_t micro_batch = 0;
  };
  struct Run {
    int64_t offset, numel;
  };

  EpochOrder order;
  int64_t rank, world_size;
  DistributedSamplerOptions options;
  Cursor received, requested;
  std::optional<int64_t> loop_end;  // end of the epoch that a loader reads; empty: no loader reads now
  int64_t first_requests = 0;       // requests that a loader still makes before the loop receives its first batch
  std::optional<torch::data::FullDataLoaderOptions> loader;

  int64_t of_step() const { return world_size * options.batch_numel * options.accumulation; }
  int64_t end_of_epoch(int64_t place) const { return (place / order.items_numel() + 1) * order.items_numel(); }

  // Returns this rank's range of the step that begins at `first`, relative to `first`. `end` is the end of the epoch,
  // or empty if steps continue in the next epoch.
  Run run_of(int64_t first, std::optional<int64_t> end) const {
    const int64_t of_rank = options.batch_numel * options.accumulation;
    if (!end || *end - first >= of_step()) return {rank * of_rank, of_rank};
    if (options.drop_last) return {0, 0};
    const int64_t rest = *end - first;
    if (options.partition) return {rest * rank / world_size, rest * (rank + 1) / world_size - rest * rank / world_size};
    const int64_t numel = (rest + world_size - 1) / world_size;
    return {rank * numel, numel};
  }

  void advance(Cursor& cursor, std::optional<int64_t> end) const {  // moves the cursor past one micro-batch
    if (++cursor.micro_batch * options.batch_numel < run_of(cursor.first, end).numel) return;
    cursor.micro_batch = 0;
    cursor.first += of_step();
    if (end && (cursor.first > *end || run_of(cursor.first, end).numel == 0)) cursor.first = *end;
  }

  std::vector<int64_t> items(const Cursor& cursor, std::optional<int64_t> end) {
    const Run run = run_of(cursor.first, end);
    const int64_t begin = cursor.micro_batch * options.batch_numel;
    std::vector<int64_t> found(static_cast<size_t>(std::min(options.batch_numel, run.numel - begin)));
    for (size_t i = 0; i < found.size(); ++i) {
      int64_t place = cursor.first + run.offset + begin + static_cast<int64_t>(i);
      if (end && place >= *end) {  // wraps around to the beginning of the epoch
        const int64_t numel = order.items_numel();
        place = *end - numel + (place - *end) % numel;
      }
      found[i] = order.item(place);
    }
    return found;
  }

  // Begins a loop, and returns the end of its epoch. With drop_last, skips the remaining items if they fill no step. If
  // this rank gets no batch, moves the cursor to the end.
  int64_t begin_loop(Cursor& cursor) const {
    int64_t end = end_of_epoch(cursor.first);
    if (options.drop_last && cursor.micro_batch == 0 && end - cursor.first < of_step()) {
      cursor.first = end;
      end = end_of_epoch(end);
    }
    if (run_of(cursor.first, end).numel == 0) cursor.first = end;
    return end;
  }

  void begin_at(int64_t first) {
    received = {first, 0};
    if (options.drop_last) static_cast<void>(begin_loop(received));
    requested = received;
    loop_end.reset();
    first_requests = 0;
  }

  // Updates `received` on a loader's request. After its first requests, each one means that the loop received a batch.
  void count_received(bool request_is_served) {
    if (!loader || loader->workers == 0) {
      received = requested;
    } else if (first_requests > 0) {
      first_requests = request_is_served ? first_requests - 1 : 0;
    } else if (received.first < *loop_end) {
      advance(received, loop_end);
    }
  }

  void set_drop_last(bool drop_last) {
    if (drop_last && options.partition)
      throw std::invalid_argument("a sampler has drop_last or partition, not both: a partition has each item once");
    require(!drop_last || order.items_numel() >= of_step(), "drop_last leaves no item of ", order.items_numel(),
            ": a step of all ranks takes ", of_step());
    options.drop_last = drop_last;
  }

  StateValues values() const {
    return {{"items", order.items_numel()},
            {"seed", std::to_string(options.seed)},
            {"shuffle", options.shuffle},
            {"taken", received.first}};
  }
};

DistributedSampler::DistributedSampler(int64_t items_numel, int rank, int world_size, DistributedSamplerOptions options)
    : position_(std::make_shared<Position>(Position{
          EpochOrder(items_numel, options.seed, options.shuffle), rank, world_size, options, {}, {}, {}, 0, {}})) {
  require_range(world_size, "world_size", 1);
  require_range(options.batch_numel, "batch_numel", 1, kMostItems / world_size);
  require_range(options.accumulation, "accumulation", 1, kMostItems / world_size / options.batch_numel);
  require(rank >= 0 && rank < world_size, "rank is ", rank, ", expected 0 to ", world_size - 1);
  position_->set_drop_last(options.drop_last);
}

std::vector<int64_t> DistributedSampler::next() {
  Position& at = *position_;
  if (at.options.partition)
    throw std::logic_error(
        "next() is endless, and a partition ends: use a data loader, or reset() and next(batch_numel)");
  std::optional<int64_t> end;
  if (at.options.drop_last) end = at.begin_loop(at.received);
  auto found = at.items(at.received, end);
  at.advance(at.received, end);
  at.requested = at.received;
  at.loop_end.reset();
  return found;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_numel) {
  Position& at = *position_;
  require(batch_numel == static_cast<size_t>(at.options.batch_numel), "the data loader asks for batches of ",
          batch_numel, ", the sampler has batch_numel ", at.options.batch_numel, ": set both to one value");
  if (!at.loop_end) reset();
  std::optional<std::vector<size_t>> found;
  if (at.requested.first < *at.loop_end) {
    const auto items = at.items(at.requested, at.loop_end);
    found.emplace(items.begin(), items.end());
    at.advance(at.requested, at.loop_end);
  }
  at.count_received(found.has_value());
  return found;
}

void DistributedSampler::reset(std::optional<size_t> new_items_numel) {
  Position& at = *position_;
  if (new_items_numel && static_cast<int64_t>(*new_items_numel) != at.order.items_numel()) {
    Position changed = at;  // a copy, so that an error leaves the sampler unchanged
    changed.order = EpochOrder(static_cast<int64_t>(*new_items_numel), at.options.seed, at.options.shuffle);
    changed.set_drop_last(at.options.drop_last);
    changed.begin_at(epoch() * changed.order.items_numel());
    at = std::move(changed);
  }
  at.loop_end = at.begin_loop(at.received);
  at.requested = at.received;
  at.first_requests = at.loader && at.loader->workers > 0 ? static_cast<int64_t>(at.loader->max_jobs) : 0;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  require_range(epoch, "epoch", 0, kMostTaken / position_->order.items_numel());
  if (epoch != this->epoch()) position_->begin_at(epoch * position_->order.items_numel());
}

int DistributedSampler::rank() const { return static_cast<int>(position_->rank); }
int DistributedSampler::world_size() const { return static_cast<int>(position_->world_size); }
int64_t DistributedSampler::epoch() const { return position_->received.first / position_->order.items_numel(); }
int64_t DistributedSampler::micro_batch() const { return position_->received.micro_batch; }

int64_t DistributedSampler::batches_left() const {
  const Position& at = *position_;
  Position::Cursor cursor = at.received;
  const int64_t end = at.loop_end ? *at.loop_end : at.begin_loop(cursor);
  if (cursor.first >= end) return 0;
  const int64_t batch = at.options.batch_numel;
  auto batches = [&](int64_t items) { return (items + batch - 1) / batch; };
  const int64_t full_steps = (end - cursor.first) / at.of_step();
  return full_steps * at.options.accumulation +
         batches(at.run_of(cursor.first + full_steps * at.of_step(), end).numel) - cursor.micro_batch;
}

void DistributedSampler::follow(const torch::data::FullDataLoaderOptions& loader) {
  Position& at = *position_;
  at.set_drop_last(at.options.drop_last || loader.drop_last);
  at.loader.emplace(loader);
  at.requested = at.received;
  at.loop_end.reset();
}

StateValues DistributedSampler::state_values() const {
  const Position& at = *position_;
  require<std::logic_error>(at.received.micro_batch == 0, "a sampler is saved between steps; it has given ",
                            at.received.micro_batch, " of ", at.options.accumulation, " micro-batches of one");
  require<std::logic_error>(!at.loader || at.loader->enforce_ordering || at.received.first == at.requested.first,
                            "a sampler cannot be saved while a data loader without enforce_ordering reads ahead: save "
                            "between epochs, or set enforce_ordering(true)");
  return at.values();
}

void DistributedSampler::check_state_values(const StateValues& values) const {
  const StateValues own = position_->values();
  require_same_form(values, own, "a sampler");
  for (const char* name : {"items", "seed", "shuffle"})
    require(values.at(name) == own.at(name), "the state of a sampler is of other data: '", name, "' differs");
  const auto taken = std::get<int64_t>(values.at("taken"));
  require(taken >= 0 && taken <= kMostTaken, "the state of a sampler has taken ", taken, " items, expected 0 to ",
          kMostTaken);
}

void DistributedSampler::load_state_values(const StateValues& values) {
  position_->begin_at(std::get<int64_t>(values.at("taken")));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& [name, value] : state_values())
    std::visit([&, &name = name](const auto& held) { archive.write(name, c10::IValue(held)); }, value);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  StateValues values;  // lacks values that the archive lacks, or has in another type
  for (const auto& [name, own] : position_->values()) {
    c10::IValue found;
    archive.try_read(name, found);
    if (found.isInt()) values[name] = found.toInt();
    if (found.isBool()) values[name] = found.toBool();
    if (found.isString()) values[name] = found.toStringRef();
  }
  check_state_values(values);
  load_state_values(values);
}

}  // namespace tessera
