#include "core/comm/store_mailbox.h"

#include <exception>
#include <stdexcept>
#include <utility>

#include "core/comm/group_process.h"
#include "core/comm/store_client.h"

namespace tessera::internal {
namespace {

const HasStore& owner_of_store(const Communicator& comm) {
  const auto* owner = dynamic_cast<const HasStore*>(&comm);
  if (owner == nullptr) throw std::logic_error("StoreMailbox: this backend keeps no store");
  return *owner;
}

}  // namespace

StoreMailbox::StoreMailbox(const Communicator& comm, std::string topic)
    : owner_(owner_of_store(comm)), store_(owner_.store()), topic_(std::move(topic)) {}

int StoreMailbox::ended_rank() const { return owner_.ended_rank(); }

template <class Act>
auto StoreMailbox::reach(const std::string& name, Act act) const {
  const std::string key = "tessera/notes/" + topic_ + "/" + name;
  try {
    return act(key);
  } catch (const std::exception&) {  // a store of the program may throw any exception
    throw CommError("the group's store, in rank 0's process or the launcher's, does not answer about '" + topic_ + "/" +
                    name + "': " + text_of(std::current_exception()));
  }
}

void StoreMailbox::leave(const std::string& name, const std::string& text) const {
  reach(name, [&](const std::string& key) { store_->set(key, text); });
}

std::optional<std::string> StoreMailbox::find(const std::string& name) const {
  static const std::string absent(1, '\0');
  const std::string text = reach(name, [&](const std::string& key) {
    return store_->compareSet(key, absent, absent);  // get() would block until the text exists
  });
  return text == absent ? std::nullopt : std::optional(text);
}

int64_t StoreMailbox::add(const std::string& name, int64_t amount) const {
  return reach(name, [&](const std::string& key) { return store_->add(key, amount); });
}

void StoreMailbox::remove(const std::string& name) const {
  reach(name, [&](const std::string& key) { store_->deleteKey(key); });
}

void StoreMailbox::limit_patience(std::chrono::milliseconds patience) const {
  StoreClient::limit_patience(*store_, patience);
}

}  // namespace tessera::internal
