"""Whether a server can be reached from its own machine only, and under which names."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

NAMES = ("127.0.0.1", "::1", "localhost", "[::1]")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address, or the name localhost. Other names are not looked up."""
    try:
        found = ip_address(address)
    except ValueError:
        return address.lower() == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def own_names(bound: str, asked: str) -> tuple[str, ...]:
    """Return the hosts that requests may name where only this machine reaches `bound`; () where others do.

    asked: how the address was written, which its clients may use too.
    """
    if not is_loopback(bound):
        return ()
    ways = (f"[{one}]" if ":" in one else one for one in (bound, asked.lower()))
    return tuple(dict.fromkeys((*NAMES, *ways)))
