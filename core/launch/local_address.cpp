#include "core/launch/local_address.h"

#include <c10/util/env.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "core/runtime/file.h"
#include "core/runtime/host.h"

namespace tessera::internal {
namespace {

struct Socket {
  explicit Socket(const addrinfo& to) : fd(::socket(to.ai_family, to.ai_socktype | SOCK_CLOEXEC, 0)) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() {
    if (fd >= 0) ::close(fd);
  }
  const int fd;
};

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// Returns the addresses of a host and "". If the name cannot be resolved, returns null and the error text.
std::pair<AddressList, std::string> resolve(const std::string& host, int port, int type) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code == 0) return {AddressList(found, ::freeaddrinfo), ""};
  return {AddressList(nullptr, ::freeaddrinfo), "the name \"" + host + "\" cannot be resolved (" +
                                                    ::gai_strerror(code) +
                                                    "); set MASTER_ADDR to a name or address of rank 0's host that "
                                                    "this host knows"};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  const int code = ::getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  if (code != 0) throw std::runtime_error(std::string("cannot read an address of this host: ") + ::gai_strerror(code));
  return text;
}

// Returns "" if the connection succeeds within `timeout_ms`. Otherwise returns the error.
std::string connect_within(const Socket& socket, const addrinfo& address, int timeout_ms) {
  ::fcntl(socket.fd, F_SETFL, O_NONBLOCK);
  if (::connect(socket.fd, address.ai_addr, address.ai_addrlen) == 0) return {};
  if (errno != EINPROGRESS) return std::strerror(errno);
  pollfd waiting{socket.fd, POLLOUT, 0};
  if (retried([&] { return ::poll(&waiting, 1, timeout_ms); }) <= 0) return std::strerror(ETIMEDOUT);
  int error = 0;
  socklen_t length = sizeof(error);
  ::getsockopt(socket.fd, SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? std::string() : std::strerror(error);
}

}  // namespace

std::string interface_address(const std::string& name) {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw std::runtime_error(std::string("getifaddrs: ") + std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> interfaces(first, ::freeifaddrs);
  std::string ipv6, others;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (name != entry->ifa_name) {
      if (family == AF_INET) others += (others.empty() ? "" : ", ") + std::string(entry->ifa_name);
    } else if (family == AF_INET) {
      return numeric(entry->ifa_addr, sizeof(sockaddr_in));
    } else if (ipv6.empty()) {
      ipv6 = numeric(entry->ifa_addr, sizeof(sockaddr_in6));
    }
  }
  if (!ipv6.empty()) return ipv6;
  throw std::invalid_argument("tessera::init: GLOO_SOCKET_IFNAME=" + name +
                              ": expected one network interface of this host that has an address (" + others + ")");
}

std::string address_towards(const std::string& host, int port) {
  auto [addresses, reason] = resolve(host, port, SOCK_DGRAM);
  if (!addresses) throw std::runtime_error(reason);
  for (const addrinfo* entry = addresses.get(); entry != nullptr; entry = entry->ai_next) {
    const Socket socket(*entry);
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    // Connecting a datagram socket sends nothing: the kernel only chooses a route, and with it an address.
    if (socket.fd >= 0 && ::connect(socket.fd, entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::getsockname(socket.fd, reinterpret_cast<sockaddr*>(&own), &length) == 0)
      return numeric(reinterpret_cast<const sockaddr*>(&own), length);
    reason = std::strerror(errno);
  }
  throw std::runtime_error("no way to " + host + ": " + reason +
                           "; set GLOO_SOCKET_IFNAME to the interface that the other ranks can reach");
}

std::string host_and_boot() { return host_name() + "/" + boot_id(); }

std::string named_address() {
  const std::string name = c10::utils::get_env("GLOO_SOCKET_IFNAME").value_or("");
  return name.empty() ? "" : interface_address(name);
}

std::string public_address() {
  if (std::string named = named_address(); !named.empty()) return named;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return "127.0.0.1";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> interfaces(first, ::freeifaddrs);
  std::string ipv6;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0)
      continue;
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) return numeric(entry->ifa_addr, sizeof(sockaddr_in));
    if (family == AF_INET6 && ipv6.empty()) ipv6 = numeric(entry->ifa_addr, sizeof(sockaddr_in6));
  }
  return ipv6.empty() ? "127.0.0.1" : ipv6;
}

void require_loopback(int port) {
  try {
    address_towards("127.0.0.1", port);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(c10::str(error.what(), "; is the loopback interface down? (ip link set lo up)"));
  }
}

bool is_loopback_address(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address.starts_with("::ffff:127.");
}

std::string try_connect(const std::string& host, int port, int timeout_ms) {
  auto [addresses, reason] = resolve(host, port, SOCK_STREAM);
  for (const addrinfo* entry = addresses.get(); entry != nullptr; entry = entry->ai_next) {
    const Socket socket(*entry);
    reason = socket.fd < 0 ? std::strerror(errno) : connect_within(socket, *entry, timeout_ms);
    if (reason.empty()) return {};
  }
  return reason;
}

}  // namespace tessera::internal
