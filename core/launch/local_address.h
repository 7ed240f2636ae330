#pragma once

#include <string>

namespace tessera::internal {

// The address of this host's network interface `name`, IPv4 if it has one. Throws
// std::invalid_argument, which lists the interfaces there are, if it has no address.
std::string interface_address(const std::string& name);

// The address of this host from which the kernel would send to `host`. Sends nothing. A loopback
// address if `host` is this host under a name that means loopback here (Debian's /etc/hosts gives
// a host's own name as 127.0.1.1). Throws std::runtime_error if there is no way to `host`.
std::string address_towards(const std::string& host, int port);

// Whether a numeric address is of the loopback network.
bool is_loopback_address(const std::string& address);

// Tries once to connect to host:port by TCP, for at most `timeout_ms`. Returns why it failed, or an
// empty text: somebody listens there.
std::string try_connect(const std::string& host, int port, int timeout_ms);

}  // namespace tessera::internal
