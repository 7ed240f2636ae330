#include "tessera/flat/pass_reports.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "tessera/comm/agreement.h"

namespace tessera {
namespace {

constexpr int64_t kFingerprintBytes = 8;

// After the fingerprint: one bit a parameter that was used, then one a bucket with late gradients.
void set_bit(uint8_t* bytes, size_t bit) { bytes[bit / 8] |= static_cast<uint8_t>(1U << (bit % 8)); }
bool has_bit(const uint8_t* bytes, size_t bit) { return (bytes[bit / 8] >> (bit % 8) & 1) != 0; }

const uint8_t* bits_of(const at::Tensor& table, int rank) {
  return table.const_data_ptr<uint8_t>() + rank * table.size(1) + kFingerprintBytes;
}

}  // namespace

PassUse PassReports::exchange(PassUse own, const std::function<bool()>& meanwhile) {
  if (!first_.used.empty()) {
    require_first_use(own);
    meanwhile();
    return first_;
  }
  GatheredReports reports(*mesh_.world, encoded(own), "the end of backward");
  const bool must_know = meanwhile() || options_.refuse_uneven_use;
  reports.finish();
  if (mesh_.world->device().is_cpu()) {
    own = read(reports.wait());
  } else {
    const std::string subject = "what was gathered and reduced since the last backward, in this one or a few before";
    if (must_know) {  // maybe not on all ranks
      reports.require_alike(kFingerprintBytes, subject);
      own.used = read(reports.wait()).used;
    } else {
      late_reports_.add(std::move(reports));
    }
    late_reports_.require_alike(kFingerprintBytes, subject);
  }
  if (options_.is_static) first_ = own;
  return own;
}

std::vector<uint8_t> PassReports::encoded(const PassUse& own) const {
  std::vector<uint8_t> bytes(kFingerprintBytes + (own.used.size() + own.late.size() + 7) / 8, 0);
  const uint64_t value = log_.fingerprint();
  std::memcpy(bytes.data(), &value, sizeof(value));
  uint8_t* bits = bytes.data() + kFingerprintBytes;
  for (size_t i = 0; i < own.used.size(); ++i)
    if (own.used[i]) set_bit(bits, i);
  for (size_t bucket = 0; bucket < own.late.size(); ++bucket)
    if (own.late[bucket]) set_bit(bits, own.used.size() + bucket);
  return bytes;
}

PassUse PassReports::read(const at::Tensor& table) const {
  PassUse use{std::vector<bool>(parameters_.size(), false), std::vector<bool>(buckets_.size(), false)};
  for (int rank = 0; rank < mesh_.world->size(); ++rank) {
    const uint8_t* bits = bits_of(table, rank);
    for (size_t i = 0; i < use.used.size(); ++i) use.used[i] = use.used[i] || has_bit(bits, i);
    for (size_t bucket = 0; bucket < use.late.size(); ++bucket)
      use.late[bucket] = use.late[bucket] || has_bit(bits, use.used.size() + bucket);
  }
  if (first_unlike(table, kFingerprintBytes))
    require_agreement(*mesh_.world, "what was gathered and reduced since the last backward", log_.lines());
  if (options_.refuse_uneven_use) check_even_use(table, use);
  return use;
}

void PassReports::check_even_use(const at::Tensor& table, const PassUse& use) const {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    for (const size_t i : buckets_[bucket].members)
      for (int rank = 0; use.used[i] && rank < mesh_.world->size(); ++rank)
        if (!has_bit(bits_of(table, rank), i))
          throw std::invalid_argument("parameter '" + parameters_[i].fqn + "' of " + buckets_[bucket].name +
                                      " had no gradient on rank " + std::to_string(rank) +
                                      ", but had one on others (refuse_uneven_use)");
}

// With a static graph each rank looks for itself.
void PassReports::require_first_use(const PassUse& own) const {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    if (own.late[bucket] && !first_.late[bucket])
      throw std::logic_error(buckets_[bucket].name + " on rank " + std::to_string(mesh_.world->rank()) +
                             " came in several parts, but in one on every rank in the first backward, and a static "
                             "graph promises that every iteration is the same");
  for (size_t i = 0; i < own.used.size(); ++i)
    if (own.used[i] && !first_.used[i])
      throw std::logic_error("parameter '" + parameters_[i].fqn + "' on rank " + std::to_string(mesh_.world->rank()) +
                             " has a gradient, but had none on any rank in the first backward, and a static graph "
                             "promises that every iteration is the same");
}

}  // namespace tessera
