"""The interface of a transport between a server and its clients, and its faults."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

Member = int | str
LONGEST_TEXT = 200
GUILTY = ("malformed", "refused", "not finite", "stale", "unreadable")


@dataclass(frozen=True)
class Fault:
    """An answer that does not count."""

    member: Member
    kind: str  # "silent", "malformed", "error 2" (the engine's codes) ...: the engine's page lists them
    text: str  # from the member, so cut and cleaned

    @property
    def guilty(self) -> bool:
        """Whether the member answered, and wrongly: it is not asked again in this round, for which others would pay."""
        return self.kind in GUILTY

    def __str__(self) -> str:
        return f"node {self.member}: {self.kind}: {self.text}"


def clean(text: object) -> str:
    """Make untrusted text safe to print: one short line without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:LONGEST_TEXT])


def fault(member: Member, kind: str, text: object) -> Fault:
    """A fault whose text is safe to print, however it came about."""
    return Fault(member, kind, clean(text))


class Engine(Protocol):
    """Carries asks to members and brings back what they answer. What is lost with the engine itself, it raises."""

    def members(self) -> list[Member]:
        """Those that can be asked now, in a fixed order."""

    def ask(
        self, common: bytes, own: Mapping[Member, bytes], *, label: str, timeout: float
    ) -> Iterator[tuple[Member, bytes | Fault]]:
        """Send `common` to the members in `own`, each with bytes of its own; yield answers and faults as they come.

        Every member that was asked is named at least once; after `timeout` seconds those that are missing are silent.
        An iterator that is closed leaves the rest.

        Args:
            common: the same for all.
            own: what each member gets besides; empty bytes if nothing.
            label: of the exchange, for logs.
            timeout: seconds.
        """

    def close(self) -> None:
        """Let go of the transport; members are told that there will be no more asks, where it can do so."""
