#include "elastic/group_store.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

namespace tessera::internal {

using nlohmann::json;

namespace {

using Keys = std::vector<std::string>;
using Values = std::vector<std::vector<uint8_t>>;

void pack(const Values& values, PeerMessage& message) {
  json sizes = json::array();
  for (const auto& value : values) {
    sizes.push_back(value.size());
    message.bytes.append(value.begin(), value.end());
  }
  message.fields["sizes"] = std::move(sizes);
}

Values unpack(const PeerMessage& message) {
  Values values;
  size_t begin = 0;
  for (const json& entry : message.fields.at("sizes")) {
    const auto size = entry.get<size_t>();
    if (size > message.bytes.size() - begin) throw std::runtime_error("the message has fewer bytes than it says");
    const auto first = message.bytes.begin() + static_cast<std::ptrdiff_t>(begin);
    values.emplace_back(first, first + static_cast<std::ptrdiff_t>(size));
    begin += size;
  }
  return values;
}

}  // namespace

void ServedStores::serve(int64_t generation) {
  const std::lock_guard lock(mutex_);
  stores_.erase(stores_.begin(), stores_.lower_bound(generation - 1));
  auto& store = stores_[generation];
  if (!store) store = c10::make_intrusive<c10d::HashStore>();
}

PeerMessage ServedStores::answer(const PeerMessage& request) const {
  c10::intrusive_ptr<c10d::HashStore> store;
  {
    const std::lock_guard lock(mutex_);
    const auto found = stores_.find(request.fields.at("generation").get<int64_t>());
    if (found == stores_.end()) throw std::runtime_error("this process serves no store for the group");
    store = found->second;
  }
  const auto call = request.fields.at("call").get<std::string>();
  const auto keys = request.fields.at("keys").get<Keys>();
  const auto number = request.fields.at("number").get<int64_t>();
  const Values values = unpack(request);
  PeerMessage answer;
  if (call == "set") {
    store->multiSet(keys, values);
  } else if (call == "get") {
    // For a missing key, HashStore would block the connection's thread.
    if (!store->check(keys)) throw std::runtime_error("the store has no such key");
    pack(store->multiGet(keys), answer);
  } else if (call == "compare_set") {
    pack({store->compareSet(keys.at(0), values.at(0), values.at(1))}, answer);
  } else if (call == "add") {
    answer.fields["number"] = store->add(keys.at(0), number);
  } else if (call == "delete") {
    answer.fields["number"] = store->deleteKey(keys.at(0)) ? 1 : 0;
  } else if (call == "check") {
    answer.fields["number"] = store->check(keys) ? 1 : 0;
  } else if (call == "count") {
    answer.fields["number"] = store->getNumKeys();
  } else {
    throw std::runtime_error("the call '" + call + "' is not known");
  }
  return answer;
}

struct GroupStore::Call {
  std::string name;
  Keys keys;
  Values values = {};
  int64_t number = 0;
};

GroupStore::GroupStore(Member server, int64_t generation, std::chrono::milliseconds timeout)
    : PollingStore(timeout), server_(std::move(server)), generation_(generation) {}

PeerMessage GroupStore::ask(const Call& call) {
  PeerMessage request;
  request.fields = {
      {"op", "store"}, {"generation", generation_}, {"call", call.name}, {"keys", call.keys}, {"number", call.number}};
  pack(call.values, request);
  const std::lock_guard lock(mutex_);
  try {
    if (!connection_) connection_ = std::make_unique<PeerConnection>(server_, getTimeout());
    return connection_->ask(std::move(request), getTimeout());
  } catch (const PeerError& error) {
    connection_.reset();  // a late answer must not be taken for the answer to the next call
    C10_THROW_ERROR(DistNetworkError, error.what());
  } catch (const std::runtime_error& error) {
    C10_THROW_ERROR(DistStoreError, error.what());
  }
}

std::vector<uint8_t> GroupStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                            const std::vector<uint8_t>& desired) {
  return unpack(ask({"compare_set", {key}, {expected, desired}})).at(0);
}

int64_t GroupStore::add(const std::string& key, int64_t value) {
  return ask({"add", {key}, {}, value}).fields.at("number").get<int64_t>();
}

bool GroupStore::deleteKey(const std::string& key) {
  return ask({"delete", {key}}).fields.at("number").get<int64_t>() == 1;
}

bool GroupStore::check(const std::vector<std::string>& keys) {
  return ask({"check", keys}).fields.at("number").get<int64_t>() == 1;
}

int64_t GroupStore::getNumKeys() { return ask({"count", {}}).fields.at("number").get<int64_t>(); }

std::vector<std::vector<uint8_t>> GroupStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return unpack(ask({"get", keys}));
}

void GroupStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) {
  ask({"set", keys, values});
}

}  // namespace tessera::internal
