"""How the ranks of a new group find each other, through torch's store.

Each rank leaves a card (where it listens, who it is, how it is configured) and waits for all
others. Ranks that do not come are named; ranks that are configured differently are refused here,
before they could disagree in the middle of training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from gflow.host import this_host
from gflow.options import OPTION_SPECS, Settings
from gflow.version import __version__

logger = logging.getLogger("gflow")

#: After this long, and again, the log says whom this rank is waiting for.
REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class Party:
    """Who is to meet: a name for messages, how many ranks, and which of the whole world."""

    group: str
    size: int
    #: Empty for the whole world.
    members: list[int]

    @property
    def prefix(self) -> str:
        """Keeps groups apart that torch gives the same name, one after the other."""
        members = ",".join(map(str, self.members))
        return f"gflow/{self.size}-{hashlib.sha256(members.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Card:
    """What one rank tells the others about itself."""

    rank: int
    #: Where it listens for other ranks, and for those of its own host.
    address: str
    entrance: str
    host: str
    #: Ranks that have the same share memory.
    host_id: str
    pid: int
    version: str
    settings: dict[str, Any]

    @classmethod
    def of_this_process(cls, rank: int, address: str, entrance: str, settings: Settings) -> Card:
        """The card of rank ``rank``, which listens on ``address`` and at ``entrance``."""
        return cls(
            rank=rank,
            address=address,
            entrance=entrance,
            host=socket.gethostname(),
            host_id=settings["host_id"] or this_host(),
            pid=os.getpid(),
            version=__version__,
            settings=settings.to_agree_on(),
        )


@dataclass(frozen=True)
class Meeting:
    """What came out of a rendezvous."""

    cards: list[Card]
    key: bytes
    #: Where this meeting has its keys in the store, and no other.
    prefix: str


def meet(store: Store, card: Card, party: Party, secret: str | None, timeout: timedelta) -> Meeting:
    """Leave ``card``, wait for the cards of all ranks, and return them with the group's key."""
    # A program may destroy a group and make it again in the same store: every rank then comes
    # once per generation, so counting arrivals tells the generations apart.
    arrivals = f"{party.prefix}/arrivals"
    generation = (store.add(arrivals, 1) - 1) // party.size
    prefix = f"{party.prefix}/{generation}"
    if card.rank == 0 and secret is None:
        store.set(f"{prefix}/key", secrets.token_hex(32))
    own_key = f"{prefix}/card/{card.rank}"
    store.set(own_key, json.dumps(dataclasses.asdict(card)))
    try:
        _wait_for_cards(store, prefix, party, card.rank, timeout)
    except BaseException:
        # Whoever comes later must not think that somebody is here who has given up.
        store.set(own_key, json.dumps(dataclasses.asdict(card) | {"gave_up": True}))
        store.add(arrivals, -1)
        raise
    texts = [json.loads(store.get(f"{prefix}/card/{rank}")) for rank in range(party.size)]
    _refuse_other_versions(texts)
    gave_up = [text["rank"] for text in texts if text.pop("gave_up", False)]
    if gave_up:
        store.add(arrivals, -1)
        raise RuntimeError(
            f"gflow: {_ranks(gave_up)} of group {party.group!r} had waited for rank {card.rank} "
            f"and given up when it came. Start all ranks at about the same time, or give "
            f"init_process_group a larger timeout."
        )
    cards = [Card(**text) for text in texts]
    _refuse_different_settings(cards, party.group)
    return Meeting(cards, _key(store, prefix, secret), prefix)


def _key(store: Store, prefix: str, secret: str | None) -> bytes:
    if secret is not None:
        # Not the same for every group: a rank of one has no business in another.
        return hashlib.sha256(f"{prefix}\n{secret}".encode()).digest()
    return bytes.fromhex(store.get(f"{prefix}/key").decode())


def _wait_for_cards(store: Store, prefix: str, party: Party, own: int, timeout: timedelta) -> None:
    keys = {rank: f"{prefix}/card/{rank}" for rank in range(party.size)}
    start = time.monotonic()
    reports = 1
    pause = 0.001
    # Asked again and again, because a store that waits logs an error of its own at each timeout.
    while not store.check(list(keys.values())):
        waited = time.monotonic() - start
        late = waited >= timeout.total_seconds()
        if late or waited >= reports * REPORT_SECONDS:
            reports += 1
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            if late and missing:
                raise RuntimeError(
                    f"gflow: rank {own} waited {waited:.0f} s for {_ranks(missing)} of group "
                    f"{party.group!r} ({party.size} ranks expected), which did not come. Was it "
                    f"started, with the same world size and the same master address, and is it "
                    f"still running?"
                )
            report = "gflow: rank %d has been waiting %.0f s for %s of group %r"
            logger.warning(report, own, waited, _ranks(missing), party.group)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _refuse_other_versions(texts: list[dict[str, Any]]) -> None:
    # Before anything else is read: the cards of another version may have other fields.
    first = texts[0]
    for text in texts[1:]:
        if text["version"] != first["version"]:
            raise RuntimeError(
                f"gflow: rank {text['rank']} ({text['host']}) runs gflow {text['version']}, rank 0 "
                f"({first['host']}) runs {first['version']}. Install the same version everywhere."
            )


def _refuse_different_settings(cards: list[Card], group: str) -> None:
    first = cards[0]
    for card in cards[1:]:
        for name, value in first.settings.items():
            if card.settings[name] != value:
                raise RuntimeError(
                    f"gflow: the ranks of group {group!r} are configured differently: {name} is "
                    f"{value!r} on rank 0 ({first.host}) and {card.settings[name]!r} on rank "
                    f"{card.rank} ({card.host}). Give {OPTION_SPECS[name].variable} (or "
                    f"Options.{name}) the same value on every rank."
                )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
