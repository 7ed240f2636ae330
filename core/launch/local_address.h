#pragma once

#include <string>

namespace tessera::internal {

// Returns the address of this host's network interface `name`, preferably IPv4. If the interface has no address, throws
// std::invalid_argument, whose text lists the interfaces.
std::string interface_address(const std::string& name);

// Returns the address from which the kernel would send to `host`. Sends nothing to it. Returns a loopback address if
// `host` is a name of this host that resolves to one (Debian's /etc/hosts maps a host's own name to 127.0.1.1). Throws
// std::runtime_error if `host` cannot be resolved or has no route.
std::string address_towards(const std::string& host, int port);

// Throws std::runtime_error if this process cannot reach itself at 127.0.0.1. Without this check, a store's client
// would try to connect until its timeout.
void require_loopback(int port);

// Whether a numeric address is a loopback address.
bool is_loopback_address(const std::string& address);

// Tries once to connect to each address of host:port by TCP, each for at most `timeout_ms`. Returns "" as soon as a
// connection succeeds. If none does, returns the reason of the last failure.
std::string try_connect(const std::string& host, int port, int timeout_ms);

// Returns an identifier of this host: its name and boot ID.
std::string host_and_boot();

// Returns the address of the network interface that GLOO_SOCKET_IFNAME names; "" if the variable is not set. Throws as
// interface_address() does.
std::string named_address();

// Returns an address of this host that other hosts can reach. This is named_address() if it is not "", or else the
// first address that is not loopback, preferably IPv4. Returns 127.0.0.1 if there is none.
std::string public_address();

}  // namespace tessera::internal
