#include <tessera/distributed_sampler.h>

#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera {
using namespace internal;
namespace {

// A number in [0, bound). std::uniform_int_distribution differs between standard libraries; the bias of the remainder,
// at most bound / 2^64, does not matter here.
int64_t draw(std::mt19937_64& random, int64_t bound) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
}

void require_at_least_one(int64_t value, const char* name) {
  if (value < 1)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", expected 1 or more");
}

}  // namespace

EpochOrder::EpochOrder(int64_t items_numel, uint64_t seed, bool shuffle)
    : items_numel_(items_numel), seed_(seed), shuffle_(shuffle) {
  require_at_least_one(items_numel, "items_numel");
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
  prepare(place / items_numel_, bound_);
  return order_[place % items_numel_];
}

int64_t EpochOrder::draw_of_epoch(int64_t epoch, int64_t bound) {
  prepare(epoch, bound);
  return drawn_;
}

DistributedSampler::DistributedSampler(int64_t items_numel, int rank, int world_size, DistributedSamplerOptions options)
    : order_(items_numel, options.seed, options.shuffle), rank_(rank), world_size_(world_size), options_(options) {
  require_at_least_one(world_size, "world_size");
  require_at_least_one(options.batch_numel, "batch_numel");
  require_at_least_one(options.accumulation, "accumulation");
  if (rank < 0 || rank >= world_size)
    throw std::invalid_argument("rank is " + std::to_string(rank) + ", expected 0 to " +
                                std::to_string(world_size - 1));
}

std::vector<int64_t> DistributedSampler::next() {
  const int64_t of_rank = options_.batch_numel * options_.accumulation;
  const int64_t begin = first_ + rank_ * of_rank + micro_batch_ * options_.batch_numel;
  std::vector<int64_t> items(static_cast<size_t>(options_.batch_numel));
  for (int64_t i = 0; i < options_.batch_numel; ++i) items[i] = order_.item(begin + i);
  if (++micro_batch_ == options_.accumulation) {
    micro_batch_ = 0;
    first_ += world_size_ * of_rank;
  }
  return items;
}

StateValues DistributedSampler::form() const {
  return {{"items", order_.items_numel()},
          {"seed", std::to_string(options_.seed)},
          {"shuffle", options_.shuffle},
          {"taken", first_}};
}

StateValues DistributedSampler::state_values() const {
  if (micro_batch_ != 0)
    throw std::logic_error("a sampler is saved between steps; it has given " + std::to_string(micro_batch_) + " of " +
                           std::to_string(options_.accumulation) + " micro-batches of one");
  return form();
}

void DistributedSampler::check_state_values(const StateValues& values) const {
  const StateValues own = form();
  require_same_form(values, own, "a sampler");
  for (const char* name : {"items", "seed", "shuffle"})
    if (values.at(name) != own.at(name))
      throw std::invalid_argument(std::string("the state of a sampler is of other data: '") + name + "' differs");
  if (std::get<int64_t>(values.at("taken")) < 0)
    throw std::invalid_argument("the state of a sampler has taken fewer than 0 items");
}

void DistributedSampler::load_state_values(const StateValues& values) {
  first_ = std::get<int64_t>(values.at("taken"));
  micro_batch_ = 0;
}

}  // namespace tessera
