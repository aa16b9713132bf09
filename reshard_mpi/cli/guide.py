"""The user's guide, which comes with the program: `reshard-mpi help TOPIC`."""

from __future__ import annotations

from pathlib import Path

from reshard_mpi.errors import UsageError
from reshard_mpi.text import did_you_mean

_FOLDER = Path(__file__).parent.parent / "guide"


def topics() -> dict[str, str]:
    """Return the title of each page, by its topic."""
    return {path.stem: _title(path) for path in sorted(_FOLDER.glob("*.md"))}


def page(topic: str | None) -> str:
    """Return a page of the guide; None: the list of pages. Raises UsageError if there is none of this topic."""
    known = topics()
    if topic is None:
        width = max(map(len, known))
        return "\n".join(f"reshard-mpi help {name:<{width}}  {title}" for name, title in known.items())
    if topic not in known:
        raise UsageError(
            f"the guide has no such page{did_you_mean(topic, known)}", expected=", ".join(known), got=topic
        )
    text = (_FOLDER / f"{topic}.md").read_text(encoding="utf-8").rstrip()
    return f"{text}\n\n{_shipped_maps()}" if topic == "maps" else text


def _shipped_maps() -> str:
    """Return the maps that come with the program, with what each is for."""
    from reshard_mpi.mapping.reading import described_maps

    described = described_maps()
    width = max(map(len, described), default=0)
    lines = [f"    {name:<{width}}  {description}" for name, description in described.items()]
    return "\n".join(["## Maps that come with the program", "", *lines])


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
