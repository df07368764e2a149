"""Choice at a limit: an item of the address that has the most."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from seeds import seeds

from segmentlog.security.address_limits import ByAddress, network_of


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2"),
        ("2001:db8:1:2::6", "2001:db8:1:2"),
        ("2001:0db8:0001:0002::", "2001:db8:1:2"),
        ("2001:db8::1", "2001:db8:0:0"),
        ("fe80::1%eth0", "fe80:0:0:0"),
        ("::1", "0:0:0:0"),
        ("", ""),
    ],
)
def test_an_address_of_ipv6_is_its_network(host: str, network: str) -> None:
    """Otherwise one customer could appear as any number of clients."""
    assert network_of(host) == network


@pytest.mark.parametrize("seed", seeds("by address"))
def test_the_address_with_most_makes_room(seed: int) -> None:
    """Its oldest or its newest item, whatever was added and removed before."""
    rng = random.Random(seed)
    held: ByAddress[int] = ByAddress()
    known: dict[int, str] = {}
    for number in range(2000):
        if known and rng.random() < 0.45:
            gone = rng.choice([*known, -1])
            known.pop(gone, None)
            held.discard(gone)
        else:
            known[number] = f"10.0.0.{rng.randrange(6)}"
            held.add(number, known[number])
        counts = Counter(known.values())
        assert (list(held), len(held)) == (list(known), len(known))
        host = f"10.0.0.{rng.randrange(6)}"
        assert held.count(host) == counts[host]
        assert held.oldest(host) == next((one for one in known if known[one] == host), None)
        free = [one for one in known if one % 3 == 0]
        assert held.oldest(host, lambda one: one % 3 == 0) == next((one for one in free if known[one] == host), None)
        chosen = held.oldest(None, lambda one: one % 3 == 0)
        assert (chosen is None) == (not free)
        if chosen is not None:
            assert chosen == next(one for one in free if known[one] == known[chosen])
            assert counts[known[chosen]] == max(counts[known[one]] for one in free)
        oldest, newest = held.oldest(), held.newest()
        if not known:
            assert oldest is newest is None
            continue
        assert oldest is not None
        assert newest is not None
        assert known[oldest] == known[newest]
        of_one = [one for one in known if known[one] == known[oldest]]
        assert len(of_one) == max(counts.values())
        assert (oldest, newest) == (of_one[0], of_one[-1])
