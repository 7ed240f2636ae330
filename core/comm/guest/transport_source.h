#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/fingerprint.h"
#include "core/comm/gloo/transport.h"

namespace tessera::internal {

// A part of the program's group: its members, and a number that distinguishes its messages from those of other parts.
struct PartOfGroup {
  std::vector<int> members = {};  // indexed by rank in the part; empty for the whole group
  uint64_t number = 0;

  int rank_of(int member) const { return members.empty() ? member : members[static_cast<size_t>(member)]; }
  // Returns a hash of the tag and the part, which the transport reduces to the range of its library's message tags.
  uint64_t number_of(const MessageTag& tag) const {
    const uint64_t sum =
        Fingerprint().add(tag.sequence).add(tag.fingerprint).add(tag.step).add(tag.part).add(number).value();
    return sum ^ (sum >> 32);
  }
  PartOfGroup part(const std::string& name, const std::vector<int>& of_members) const {
    PartOfGroup made{{}, Fingerprint().add(number).add(name).value()};
    for (const int member : of_members) made.members.push_back(rank_of(member));
    return made;
  }
};

// Factory of the transports of a group and its parts, if another library of the program moves the bytes.
class TransportSource {
 public:
  // Makes this rank's transport for a part. Not collective. May be called by any thread.
  using Make = std::function<std::unique_ptr<Transport>(const PartOfGroup& part)>;
  explicit TransportSource(Make make, PartOfGroup part = {}) : make_(std::move(make)), part_(std::move(part)) {}

  std::unique_ptr<Transport> make() const { return make_(part_); }
  // Returns the source for the part that consists of the ranks `members`. `name` must be unique among the parts.
  std::shared_ptr<TransportSource> part(const std::string& name, const std::vector<int>& members) const {
    return std::make_shared<TransportSource>(make_, part_.part(name, members));
  }

 private:
  const Make make_;
  const PartOfGroup part_;
};

}  // namespace tessera::internal
