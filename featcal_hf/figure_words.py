"""Numbers and names as a person says them."""

from __future__ import annotations

from collections.abc import Sequence


def percent(share: float) -> str:
    """A share in percent: one decimal below ten, none above."""
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def brief(value: float, digits: int = 3) -> str:
    """A number that may be of any size, with so many digits."""
    return f"{value:#.{digits}g}".rstrip(".")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def stacks(paths: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Blocks that follow each other in one part of the model: its name (empty where there is one) and their places."""
    found: list[tuple[str, list[int]]] = []
    for place, path in enumerate(paths):
        prefix = path.rpartition(".")[0]
        if not found or found[-1][0] != prefix:
            found.append((prefix, []))
        found[-1][1].append(place)
    if len(found) == 1:
        return [("", found[0][1])]
    return [(prefix.split(".")[0].removesuffix("_model"), places) for prefix, places in found]


def short_names(paths: Sequence[str]) -> list[str]:
    """A short name for each block: its number, after its part's name where the model has several."""
    names = [""] * len(paths)
    for part, places in stacks(paths):
        for place in places:
            number = paths[place].rpartition(".")[2]
            names[place] = f"{part} {number}" if part else number
    return names


def short_modules(names: Sequence[str]) -> list[str]:
    """The end of each module's path, as long as it takes to tell them apart."""
    parts = [name.split(".") for name in names]
    return [
        next(
            brief
            for length in range(1, len(own) + 1)
            if sum(other[-length:] == own[-length:] for other in parts) == 1 or length == len(own)
            for brief in [".".join(own[-length:])]
        )
        for own in parts
    ]


def short_input(modules: Sequence[str]) -> str:
    """The modules that read one input, in one name: 'q_proj, k_proj, v_proj'."""
    return ", ".join(short_modules(modules))
