// Makes groups for programs whose ranks another library has started or connected.
#include "core/launch/guest_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <tessera/errors.h>
#include "core/comm/backends.h"
#include "core/comm/group_process.h"
#include "core/comm/guest/guest_store.h"
#include "core/comm/guest/guest_transports.h"
#include "core/comm/guest/text_exchange.h"
#include "core/comm/nccl/nccl_communicator.h"
#include "core/launch/local_address.h"
#include "core/runtime/call_with_timeout.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

// One rank of a program that is to join a group: its arguments, and its means to exchange texts with the other ranks.
struct Guests {
  std::string who;  // name of the called function, for errors
  int rank, size;
  GroupOptions options;
  TextExchange exchange;
  c10::intrusive_ptr<c10d::Store> store;  // null if make_group_of() must make one
  std::string host;                       // identifier of the host, equal on its ranks
  bool may_be_mpi = false;
  c10::intrusive_ptr<c10d::ProcessGroup> group = nullptr;
  std::shared_ptr<MessageLibrary> library = nullptr;
  std::string address = {};  // address of this rank for other hosts; "" means public_address()
};

bool is_timeout(std::chrono::milliseconds timeout) {
  return timeout > std::chrono::milliseconds::zero() && timeout <= kLongestTimeout;
}

at::Device device_of(const GroupOptions& options, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  at::Device device = options.device.value_or(options.backend == "nccl" ? at::kCUDA : at::kCPU);
  if (group && !options.device) {
    const auto types = group->getDeviceTypes();
    const bool has_cpu = std::ranges::any_of(types, [](const at::Device& type) { return type.is_cpu(); });
    if (!has_cpu && !types.empty()) device = types.front();
  }
  if (device.is_cuda() && !device.has_index()) {
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    device = guard.getDevice();
  }
  return device;
}

// Throws std::invalid_argument for invalid options. Called before the options are compared over ranks.
void check(const Guests& guests, const at::Device& device) {
  const auto& [backend, given_device, timeout, peer_memory, registered_memory, rank_order_sums] = guests.options;
  require(is_timeout(timeout), "GroupOptions::timeout is ", timeout.count(),
          " ms; expected more than 0 and at most a year");
  const bool is_known = backend.empty() || (!guests.group && (backend == "gloo" || backend == "nccl")) ||
                        (guests.may_be_mpi && backend == "mpi");
  require(is_known, "GroupOptions::backend is \"", backend, "\"; expected ",
          guests.group        ? "\"\": the process group has one"
          : guests.may_be_mpi ? "\"gloo\", \"nccl\", \"mpi\", or empty for the device's own"
                              : "\"gloo\", \"nccl\", or empty for the device's own");
  require(device.is_cpu() || device.is_cuda(), "GroupOptions::device is ", device, "; expected cpu or cuda");
  require(backend.empty() || (backend == "nccl") == device.is_cuda(), "GroupOptions::backend is \"", backend,
          "\" and GroupOptions::device is ", device, "; expected gloo or mpi with cpu, or nccl with cuda");
  require(device.is_cuda() || !registered_memory,
          "GroupOptions::registered_memory is NCCL's, and this group would not use NCCL");
  require(
      device.is_cuda() || !guests.group || !rank_order_sums,
      "GroupOptions::rank_order_sums is set, but a process group of CPUs adds in an order of its own: leave it off");
}

// The options, host and address of one rank.
struct Introduction {
  std::string options, host, address;
};

// Returns the address at which other ranks reach `rank`. On one host, this is the loopback address, unless the user has
// named an interface: ranks in different network namespaces of a host do not share the loopback interface.
std::string address_of(const Introduction& rank, bool one_host) {
  return one_host && named_address().empty() ? "127.0.0.1" : rank.address;
}

// Exchanges the introductions of all ranks, and returns them in rank order. If the options of any rank are invalid, or
// if they differ between ranks, throws std::invalid_argument on all ranks.
std::vector<Introduction> introduce(const Guests& guests, const at::Device& device) {
  const auto texts = exchange_or_fail(guests.exchange, guests.who, [&] {
    check(guests, device);
    return c10::str(describe(guests.options, device), '\n', guests.host, '\n',
                    guests.address.empty() ? public_address() : guests.address, '\n');
  });
  std::vector<Introduction> all;
  for (const std::string& text : texts) {
    Introduction one;
    std::istringstream lines(text);
    std::getline(lines, one.options);
    std::getline(lines, one.host);
    std::getline(lines, one.address);
    require(all.empty() || one.options == all[0].options, guests.who, ": rank ", all.size(), " passes ", one.options,
            ", rank 0 ", all.empty() ? "" : all[0].options,
            "; expected equal GroupOptions on all ranks, but for the device's index");
    all.push_back(std::move(one));
  }
  return all;
}

class BorrowedNccl : public NcclBackends {
 public:
  explicit BorrowedNccl(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}
  c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>&, int, int, at::Device,
                                         std::chrono::milliseconds) override {
    return backend_;
  }
  c10::intrusive_ptr<c10d::Backend> split(c10d::Backend& parent, const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks, std::chrono::milliseconds) override {
    c10::intrusive_ptr<c10d::Backend::Options> options;
    try {
      options = parent.getBackendOptions();
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): a backend without options is split without any
    }
    auto part = parent.split(store, ranks, options);
    if (part) part->setBoundDeviceId(parent.getBoundDeviceId());
    return part;
  }
  c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work) override {
    const auto nccl = nccl_backends();
    return nccl ? nccl->without_tensors(work) : work;
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

// Makes the group. Collective; if one rank throws, all throw.
std::shared_ptr<Communicator> make_group_of(Guests guests) {
  const auto& options = guests.options;
  std::string unusable;  // the error if this rank cannot use its device; otherwise ""
  at::Device device = at::kCPU;
  try {
    device = device_of(options, guests.group);
  } catch (const std::exception&) {
    unusable = text_of(std::current_exception());
  }
  const TextExchange exchange =
      guests.size == 1 ? [](const std::string& own) { return std::vector{own}; } : guests.exchange;
  guests.exchange = exchange;
  if (!unusable.empty())
    exchange_or_fail(exchange, guests.who, [&]() -> std::string { throw std::invalid_argument(unusable); });
  const auto ranks = introduce(guests, device);
  const bool one_host =
      std::ranges::all_of(ranks, [&](const Introduction& rank) { return rank.host == ranks[0].host; });
  MadeStore made{guests.store, false};
  if (guests.size == 1) {
    if (!made.store) made.store = c10::make_intrusive<c10d::HashStore>();
  } else if (!made.store) {
    made = make_store(exchange, guests.who, guests.rank, one_host && options.peer_memory,
                      address_of(ranks[0], one_host), options.timeout);
  } else {
    made.serves = guests.rank == 0 && serves_store(made.store);
  }
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::PrefixStore>("group", made.store);
  if (device.is_cuda()) {
    NcclOptions nccl{.timeout = options.timeout,
                     .registered_memory = options.registered_memory,
                     .rank_order_sums = options.rank_order_sums,
                     .serves_store = made.serves};
    if (!guests.group) return make_nccl_communicator(store, guests.rank, guests.size, device, nccl);
    nccl.is_borrowed = true;
    return make_nccl_communicator(std::make_shared<BorrowedNccl>(guests.group->getBackend(at::kCUDA)), store,
                                  guests.rank, guests.size, device, nccl);
  }
  GlooOptions gloo{.address = address_of(ranks[static_cast<size_t>(guests.rank)], one_host),
                   .timeout = options.timeout,
                   .peer_memory = options.peer_memory,
                   .serves_store = made.serves};
  if (guests.group) gloo.carrier = process_group_transports(guests.group);
  if (options.backend == "mpi") gloo.carrier = message_transports(guests.library);
  return make_gloo_communicator(store, guests.rank, guests.size, std::move(gloo));
}

// Calls make_group_of(). Adds the name of the function that the user called to the texts of its errors.
std::shared_ptr<Communicator> make_named_group(const Guests& guests) {
  const std::string whose = c10::str(guests.who, ": rank ", guests.rank, " of ", guests.size);
  try {
    return make_group_of(guests);
  } catch (const CommError& error) {
    const std::string text = error.what();
    throw CommError(text.starts_with(guests.who) ? text : c10::str(whose, ": ", text));
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    throw std::invalid_argument(text.starts_with(guests.who) ? text : c10::str(whose, ": ", text));
  } catch (const std::exception&) {
    throw CommError(c10::str(whose, ": ", text_of(std::current_exception())));
  }
}

// Calls next_group(). Throws CommError if the store does not answer within the timeout.
c10::intrusive_ptr<c10d::Store> keys_of_next_group(const Guests& guests, const c10::intrusive_ptr<c10d::Store>& store) {
  std::string error = "it does not answer";
  try {
    if (auto keys = call_with_timeout(
            time_to_meet(guests.options.timeout) + kAnswerGrace,
            [store, rank = guests.rank, size = guests.size] { return next_group(store, rank, size); }))
      return *keys;
  } catch (const std::exception&) {
    error = text_of(std::current_exception());
  }
  throw CommError(
      c10::str(guests.who, ": rank ", guests.rank, " of ", guests.size, " cannot use the given store: ", error));
}

// Makes `guests` exchange texts through the store. If ranks are late, an exchange throws an error that names them.
void meet_through(Guests& guests, const c10::intrusive_ptr<c10d::Store>& store) {
  guests.store = keys_of_next_group(guests, store);
  guests.exchange =
      exchange_through(guests.store, "meeting/", guests.rank, guests.size, time_to_meet(guests.options.timeout));
}

}  // namespace

std::string internal::describe(const GroupOptions& options, const at::Device& device) {
  return c10::str("backend \"", options.backend, "\", device ", c10::DeviceTypeName(device.type(), true), ", timeout ",
                  options.timeout.count(), " ms, peer_memory ", options.peer_memory, ", registered_memory ",
                  options.registered_memory, ", rank_order_sums ", options.rank_order_sums);
}

std::chrono::milliseconds internal::time_to_meet(std::chrono::milliseconds timeout) {
  return is_timeout(timeout) ? timeout : std::chrono::seconds(10);
}

std::shared_ptr<Communicator> communicator_from(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                GroupOptions options) {
  return communicator_at("", std::move(store), rank, size, std::move(options));
}

std::shared_ptr<Communicator> internal::communicator_at(std::string address, c10::intrusive_ptr<c10d::Store> store,
                                                        int rank, int size, GroupOptions options) {
  const std::string who = "tessera::communicator_from(store)";
  require(static_cast<bool>(store), who, ": the store is null");
  require(size >= 1 && rank >= 0 && rank < size, who, ": rank ", rank, " of ", size,
          "; expected a size of at least 1 and a rank from 0 to size - 1");
  Guests guests{who, rank, size, std::move(options), {}, {}, host_and_boot()};
  guests.address = std::move(address);
  if (size > 1) meet_through(guests, store);
  return make_named_group(guests);
}

std::shared_ptr<Communicator> internal::communicator_from_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                                GroupOptions options) {
  const std::string who = "tessera::communicator_from(process_group)";
  require(static_cast<bool>(group), who, ": the process group is null");
  Guests guests{who, group->getRank(), group->getSize(), std::move(options), {}, {}, host_and_boot()};
  guests.group = group;
  if (guests.size == 1) return make_named_group(guests);
  if (const c10::intrusive_ptr<c10d::Store> store = group->getStore()) {
    meet_through(guests, store);
    return make_named_group(guests);
  }
  at::Device device = at::kCPU;
  try {
    device = device_of(guests.options, group);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): make_group_of() reports the error
  }
  guests.exchange = exchange_over(group, device, time_to_meet(guests.options.timeout));
  return make_named_group(guests);
}

std::shared_ptr<Communicator> internal::communicator_from_backend(c10::intrusive_ptr<c10d::Backend> backend,
                                                                  GroupOptions options) {
  require(static_cast<bool>(backend), "tessera::communicator_from(backend): the backend is null");
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  const auto type = backend->getBackendName() == "nccl" ? at::kCUDA : options.device.value_or(at::kCPU).type();
  group->setBackend(type, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return communicator_from_group(std::move(group), std::move(options));
}

std::shared_ptr<Communicator> internal::communicator_from_library(std::shared_ptr<MessageLibrary> library,
                                                                  GroupOptions options) {
  Guests guests{
      "tessera::communicator_from_mpi", library->rank(), library->size(), std::move(options), {}, {}, library->host()};
  guests.exchange = [library](const std::string& own) { return library->exchange(own); };
  guests.may_be_mpi = true;
  guests.library = library;
  return make_named_group(guests);
}

}  // namespace tessera
