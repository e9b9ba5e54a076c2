"""Where a server listens: whether only its own machine reaches it, however that is spelt, and it alone."""

from __future__ import annotations

import socket

import pytest

from eagle_fsd.cli.mistakes import UserError
from eagle_fsd.serve import address_of, listen
from eagle_fsd.serving.entry.loopback import is_loopback, own_names


@pytest.mark.parametrize("asked", ["127.0.0.1", "127.1", "2130706433", "127.0.0.2", "localhost", "Localhost"])
def test_all_spellings_of_this_machine_are_known(asked: str) -> None:
    with listen(asked, 0) as place:
        bound, port = address_of(place)
    names = own_names(bound, asked)
    assert port > 0 and is_loopback(bound)
    assert {"127.0.0.1", "localhost", "[::1]", bound, asked.lower()} <= set(names)


@pytest.mark.parametrize("asked", ["::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"])
def test_so_are_those_of_the_newer_protocol(asked: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listen(asked, 0) as place:
        bound, _ = address_of(place)
    assert {"localhost", "[::1]", f"[{bound}]", f"[{asked}]"} <= set(own_names(bound, asked))


@pytest.mark.parametrize("asked", ["0.0.0.0", "", "::", "192.0.2.7", "2001:db8::1", "example.org"])
def test_what_others_may_reach_has_no_names(asked: str) -> None:
    bound = asked
    if asked in ("0.0.0.0", ""):
        with listen(asked, 0) as place:
            bound, _ = address_of(place)
    assert not is_loopback(bound) and own_names(bound, asked) == ()


def test_a_port_that_another_server_will_listen_at_is_refused_before_a_model_is_loaded() -> None:
    with listen("127.0.0.1", 0) as place:
        _, port = address_of(place)
        with pytest.raises(
            UserError, match=rf"^127.0.0.1 port {port} cannot be listened at \(Address already"
        ):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()  # it is free again
