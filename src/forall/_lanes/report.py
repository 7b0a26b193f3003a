"""What happened where lanes parted: collected while somebody asks for it, else not at all."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Parting(NamedTuple):
    """A construct, where it stands, and how many lanes went each way."""

    construct: str
    file: str
    line: int
    sizes: tuple[int, ...]


@dataclass
class Report:
    """Where lanes parted, what was run by other means, and why."""

    partings: list[Parting] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # a function's place: why
    converted: set[str] = field(default_factory=set)
    reruns: Counter[str] = field(default_factory=Counter)

    def parted(self, construct: str, sizes: tuple[int, ...], filename: str, line: int) -> None:
        self.partings.append(Parting(construct, filename, line, sizes))

    def text(self) -> str:
        """One line for each place where lanes parted, then what was refused."""
        times: Counter[tuple[str, str, int]] = Counter()
        least: dict[tuple[str, str, int], int] = {}
        for p in self.partings:
            place = (p.file, p.construct, p.line)
            times[place] += 1
            least[place] = min(least.get(place, sys.maxsize), *p.sizes)
        rows = [
            f"{p[0]}:{p[2]}: {p[1]}: parted {n} times, least group {least[p]}"
            for p, n in sorted(times.items())
        ]
        rows += [f"{place}: run again for each group: {why}" for place, why in self.refused.items()]
        return "\n".join(rows)
