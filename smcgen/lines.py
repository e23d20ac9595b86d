"""The file that `smcgen sample -o` writes: JSON lines, one for each sample, which are kept as they come, so that a run that was
cut off can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smcgen.errors import UsageError
from smcgen.plan import DEFAULT_PARTICLES
from smcgen.record import as_given, written
from smcgen.run import DEFAULT_ROWS

if TYPE_CHECKING:
    from smcgen.posteriors import Posteriors

BY_MEMORY = "groups"  # a setting that decides nothing about a result


class Lines:
    """Results on their way to a file.

    Attributes:
        partial: where they are until all are there.
        source: what the results were read from that were there already.
        there: number of a sample, 0 for the first of the first prompt -> such a result.
        added: how many were drawn here.
    """

    def __init__(self, partial: Path, source: Path, there: dict[int, dict[str, Any]]):
        self.partial, self.source, self.there, self.added = partial, source, there, 0

    def draw(self, draw: Callable[..., Posteriors], wanted: list[Any], seed: int | None, size: int) -> list[Posteriors]:
        """Draws and writes what is not there yet, `size` samples at a time. What is there of a parcel in part is drawn anew, so
        that the file comes out as that of a run that was never cut off.

        draw: `smcgen.sample` of a list of prompts, with keys= and seed=.
        wanted: the prompt of each sample.

        Raises UsageError where results that are there are of other prompts or were drawn under other settings."""
        for number, line in self.there.items():
            if seed is None:
                seed = line["settings"]["seed"]
            elif seed != line["settings"]["seed"]:
                raise self._other("seed")
            if number >= len(wanted) or as_given(wanted[number]) != line["given"]:
                shown = str(line["given"])[:60]
                raise UsageError(
                    f"--resume: {self.source} holds a result of another prompt, or of more samples, {shown!r}: give the same "
                    "prompts and samples (further prompts may follow), or another -o"
                )
        numbers = range(len(wanted))
        parcels = [numbers[first : first + size] for first in range(0, len(wanted), size)]
        missing = [parcel for parcel in parcels if not self.there.keys() >= set(parcel)]
        drawn_anew = {number for parcel in missing for number in parcel}
        old = [self.there[number] for number in numbers if number not in drawn_anew]
        written("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in old), self.partial)
        found: list[Posteriors] = []
        for parcel in missing:
            found.append(draw([wanted[number] for number in parcel], keys=parcel, seed=seed))
            seed = found[-1].settings["seed"]
            self._add(found[-1])
        return found

    def _add(self, posteriors: Posteriors) -> None:
        if self.there:
            old, new = next(iter(self.there.values()))["settings"], json.loads(json.dumps(posteriors.settings))
            other = [name for name in {**old, **new} if name != BY_MEMORY and old.get(name) != new.get(name)]
            if other:
                raise self._other(*other)
        with self.partial.open("a", encoding="utf-8") as stream:
            stream.write("".join(f"{post.to_json()}\n" for post in posteriors))
        self.added += len(posteriors)

    def _other(self, *settings: str) -> UsageError:
        return UsageError(
            f"--resume: {self.source} was drawn with another {', '.join(settings)}: give the same options, or another -o"
        )


def prompts_at_a_time(mode: str, particles: int | None, chains: int | None) -> int:
    """How many run at a time where the user does not say."""
    return max(1, DEFAULT_ROWS // ((particles or (1 if mode == "exact" else DEFAULT_PARTICLES)) * (chains or 1)))


@contextmanager
def lines(path: Path, resume: bool, note: Callable[[str], None]) -> Iterator[Lines]:
    """The file `path`, which appears only once it is whole; until then its lines are in `path`.part, and stay there if the run
    breaks off. That it can be written is known before anything is run.

    resume: go on with what is in `path`.part, or else in `path`.

    Raises UsageError for a file that cannot be written or holds something else, and for results that would be lost."""
    partial = path.with_name(path.name + ".part") if path.name else path
    source = partial if partial.is_file() else path
    there = _read(source) if (resume or source is partial) and source.is_file() else {}
    if there and not resume:
        raise UsageError(
            f"-o {path}: {partial.name} holds results of a run that was cut off, {len(there)} of them: go on with --resume, or "
            "delete it"
        )
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        partial.open("a").close()
    except (OSError, ValueError) as error:
        raise UsageError(f"-o {path}: cannot be written ({error})") from None
    found = Lines(partial, source, there)
    try:
        yield found
    except BaseException:
        kept = partial.read_bytes().count(b"\n")
        if kept and (found.added or source is partial):
            note(f"{kept} of the results are in {partial}: the same command with --resume goes on")
        else:
            partial.unlink()
        raise
    partial.replace(path)


def _read(source: Path) -> dict[int, dict[str, Any]]:
    """The results in a file, by their numbers. The last line counts only if it is whole."""
    found = {}
    try:
        *whole, _ = source.read_text(encoding="utf-8").split("\n")
        for line in whole:
            result = json.loads(line)
            _ = result["given"], result["settings"]["seed"]
            found[result["key"]] = result
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(f"{source}: no file of results that smcgen wrote: move it away") from None
    return found
