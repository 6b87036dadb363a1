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

from gflow.options import KNOBS, Settings
from gflow.version import __version__

logger = logging.getLogger("gflow")

#: After this long, and again, the log says whom this rank is waiting for.
REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class Card:
    """What one rank tells the others about itself."""

    rank: int
    address: str
    host: str
    pid: int
    version: str
    settings: dict[str, Any]

    @classmethod
    def of_this_process(cls, rank: int, address: str, settings: Settings) -> Card:
        """The card of rank ``rank``, which listens on ``address``."""
        host = socket.gethostname()
        return cls(rank, address, host, os.getpid(), __version__, settings.to_agree_on())


@dataclass(frozen=True)
class Meeting:
    """What came out of a rendezvous."""

    cards: list[Card]
    key: bytes
    #: Distinguishes this meeting from earlier ones in the same store.
    generation: int


def meet(
    store: Store, card: Card, size: int, group: str, secret: str | None, timeout: timedelta
) -> Meeting:
    """Leave ``card``, wait for the cards of all ranks, and return them with the group's key."""
    # A program may destroy a group and make it again in the same store: every rank then comes
    # once per generation, so counting arrivals tells the generations apart.
    arrivals = store.add("gflow/arrivals", 1)
    generation = (arrivals - 1) // size
    prefix = f"gflow/{generation}"
    if card.rank == 0 and secret is None:
        store.set(f"{prefix}/key", secrets.token_hex(32))
    store.set(f"{prefix}/card/{card.rank}", json.dumps(dataclasses.asdict(card)))
    try:
        _wait_for_cards(store, prefix, size, group, card.rank, timeout)
    except BaseException:
        store.add("gflow/arrivals", -1)
        raise
    cards = [Card(**json.loads(store.get(f"{prefix}/card/{rank}"))) for rank in range(size)]
    _refuse_different_settings(cards, group)
    return Meeting(cards, _key(store, prefix, secret), generation)


def _key(store: Store, prefix: str, secret: str | None) -> bytes:
    if secret is not None:
        return hashlib.sha256(secret.encode()).digest()
    return bytes.fromhex(store.get(f"{prefix}/key").decode())


def _wait_for_cards(
    store: Store, prefix: str, size: int, group: str, own: int, timeout: timedelta
) -> None:
    keys = {rank: f"{prefix}/card/{rank}" for rank in range(size)}
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
                    f"{group!r} ({size} ranks expected), which did not come. Was it started, with "
                    f"the same world size and the same master address, and is it still running?"
                )
            report = "gflow: rank %d has been waiting %.0f s for %s of group %r"
            logger.warning(report, own, waited, _ranks(missing), group)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _refuse_different_settings(cards: list[Card], group: str) -> None:
    first = cards[0]
    for card in cards[1:]:
        if card.version != first.version:
            raise RuntimeError(
                f"gflow: rank {card.rank} ({card.host}) runs gflow {card.version}, rank 0 "
                f"({first.host}) runs {first.version}. Install the same version everywhere."
            )
        for name, value in first.settings.items():
            if card.settings[name] != value:
                raise RuntimeError(
                    f"gflow: the ranks of group {group!r} are configured differently: {name} is "
                    f"{value!r} on rank 0 ({first.host}) and {card.settings[name]!r} on rank "
                    f"{card.rank} ({card.host}). Give {KNOBS[name].variable} (or "
                    f"Options.{name}) the same value on every rank."
                )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
