"""The layout record: which stage holds which layers, and Megatron's text form of it.

Reads and writes the same strings as Megatron's `--pipeline-model-parallel-layout`, without importing Megatron, so that
planners and tools can work where Megatron is not installed. It must not know costs, ranks or tensors.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_REPEATED_GROUP = re.compile(r"\(([^()]+)\)\*([0-9]+)")
_REPEATED_LETTER = re.compile(r"([EtmL|])\*([0-9]+)")
_LETTERS = "EtmL"
_MAX_REPEAT = 100_000
"""More layers or stages than any model has; a typing error beyond it must not fill the memory."""
_MAX_LETTERS = 1_000_000
"""The same for repeats of repeats, all parts together."""


class LayoutError(ValueError):
    """A layout that does not add up. The message names the offending token, what was expected and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one virtual stage holds, in the order in which it runs."""

    embedding: bool = False
    """Whether the word embedding is here (only ever the first chunk)."""
    num_layers: int = 0
    """Number of decoder layers."""
    num_mtp: int = 0
    """Number of multi-token-prediction layers."""
    loss: bool = False
    """Whether final norm, head and loss are here (only ever the last chunk)."""

    @property
    def text(self) -> str:
        """This chunk in Megatron's layout syntax, for example `Et*3`."""
        return ("E" if self.embedding else "") + _run("t", self.num_layers) + _run("m", self.num_mtp) + "L" * self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A contiguous split of the layers `0..num_layers-1` over `num_stages` pipeline stages.

    `chunks` are in layer order: chunk `i` is virtual stage `i // num_stages` of pipeline stage `i % num_stages`,
    as in Megatron (`PipelineParallelLayerLayout`).
    """

    chunks: tuple[Chunk, ...]
    num_stages: int

    def __post_init__(self) -> None:
        """Refuse whatever Megatron would refuse; raises LayoutError."""
        if any(count < 0 for chunk in self.chunks for count in (chunk.num_layers, chunk.num_mtp)):
            raise LayoutError(f"layout: layer counts must be at least 0, got {[chunk.num_layers for chunk in self.chunks]}")
        if self.num_stages < 1:
            raise LayoutError(f"layout: number of stages must be at least 1, got {self.num_stages}")
        if not self.chunks or len(self.chunks) % self.num_stages:
            raise LayoutError(
                f"layout {self.text!r}: {len(self.chunks)} stages cannot be spread over "
                f"{self.num_stages} pipeline stages (expected a multiple of {self.num_stages})"
            )
        _check_ends(self)
        _check_mtp(self)

    @classmethod
    def parse(cls, text: str, num_stages: int | None = None) -> "Layout":
        """Read Megatron's layout syntax, for example `Et*3|(tt|)*29,m|L`; raises LayoutError naming the bad token.

        `num_stages` None: one pipeline stage for each part of the text, that is, no virtual stages.
        """
        flat = text.replace(",", "")
        for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
            _check_length(pattern, flat, text)
            flat = pattern.sub(lambda match: match.group(1) * int(match.group(2)), flat)
        chunks = [_parse_chunk(token, text) for token in flat.split("|")]
        return cls(chunks=tuple(chunks), num_stages=len(chunks) if num_stages is None else num_stages)

    @classmethod
    def contiguous(cls, counts: Sequence[int], *, num_stages: int | None = None) -> "Layout":
        """A layout without MTP from decoder counts per chunk, in layer order; raises LayoutError."""
        last = len(counts) - 1
        chunks = tuple(Chunk(embedding=index == 0, num_layers=count, loss=index == last) for index, count in enumerate(counts))
        return cls(chunks=chunks, num_stages=num_stages or len(counts))

    @property
    def text(self) -> str:
        """This layout in Megatron's syntax; `Layout.parse(layout.text, n) == layout`."""
        return "|".join(chunk.text for chunk in self.chunks)

    @property
    def counts(self) -> tuple[int, ...]:
        """Decoder layers per chunk, in layer order."""
        return tuple(chunk.num_layers for chunk in self.chunks)

    @property
    def num_layers(self) -> int:
        """All decoder layers."""
        return sum(self.counts)

    @property
    def num_virtual(self) -> int:
        """Virtual stages (model chunks) per pipeline stage."""
        return len(self.chunks) // self.num_stages

    @property
    def last_chunk_with_layers(self) -> int:
        """Index of the chunk that holds the last decoder layer."""
        return max((index for index, count in enumerate(self.counts) if count), default=0)

    def layers_of_chunk(self, index: int) -> range:
        """Global 0-based ids of the layers in chunk `index`."""
        start = sum(self.counts[:index])
        return range(start, start + self.counts[index])

    def layers_of_stage(self, pp_rank: int) -> tuple[int, ...]:
        """Global 0-based ids of the layers that `pp_rank` holds, over all its chunks."""
        return tuple(
            layer for index in range(pp_rank, len(self.chunks), self.num_stages) for layer in self.layers_of_chunk(index)
        )

    def layers_by_chunk(self, pp_rank: int) -> tuple[range, ...]:
        """Global 0-based ids of the layers that `pp_rank` holds, by virtual stage."""
        return tuple(self.layers_of_chunk(index) for index in range(pp_rank, len(self.chunks), self.num_stages))

    def stage_of(self) -> tuple[int, ...]:
        """The pp_rank that holds layer 0, 1, 2, ..."""
        return tuple(index % self.num_stages for index, count in enumerate(self.counts) for _ in range(count))

    def with_counts(self, counts: Sequence[int]) -> "Layout":
        """The same ends and MTP with other decoder counts; raises LayoutError if layers would appear or vanish."""
        if len(counts) != len(self.chunks) or sum(counts) != self.num_layers or min(counts) < 0:
            raise LayoutError(
                f"layout {self.text!r}: counts {list(counts)} do not place {self.num_layers} layers on "
                f"{len(self.chunks)} stages"
            )
        chunks = tuple(
            Chunk(embedding=chunk.embedding, num_layers=count, num_mtp=chunk.num_mtp, loss=chunk.loss)
            for chunk, count in zip(self.chunks, counts, strict=True)
        )
        return Layout(chunks=chunks, num_stages=self.num_stages)

    def check_num_layers(self, num_layers: int) -> None:
        """Raise LayoutError unless every one of `num_layers` layers is placed exactly once."""
        if self.num_layers != num_layers:
            raise LayoutError(
                f"layout {self.text!r}: places {self.num_layers} layers, the model has {num_layers} "
                f"({abs(num_layers - self.num_layers)} {'unassigned' if self.num_layers < num_layers else 'too many'})"
            )


def even_layout(num_layers: int, num_chunks: int, num_stages: int, *, num_mtp: int = 0) -> Layout:
    """Layers spread over all chunks as evenly as they go, the embedding on the first, MTP layers and the loss on the last."""
    last = num_chunks - 1
    borders = [num_layers * index // num_chunks for index in range(num_chunks + 1)]
    chunks = tuple(
        Chunk(
            embedding=index == 0,
            num_layers=borders[index + 1] - borders[index],
            num_mtp=num_mtp if index == last else 0,
            loss=index == last,
        )
        for index in range(num_chunks)
    )
    return Layout(chunks=chunks, num_stages=num_stages)


def uniform_layout(num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None) -> Layout:
    """The split Megatron makes without a layout: `first`/`last` as given, the rest in equal parts.

    Raises LayoutError when the layers do not divide (Megatron has been seen to drop the remainder silently).
    """
    given = ", ".join(f"{name} {count}" for name, count in (("first", first), ("last", last)) if count is not None)
    if num_stages == 1 and {first, last} - {None} not in (set(), {num_layers}):
        raise LayoutError(f"1 stage must hold all {num_layers} layers, got {given}")
    fixed = {index: count for index, count in ((0, first), (num_stages - 1, last)) if count is not None}
    rest, middle = num_layers - sum(fixed.values()), num_stages - len(fixed)
    if rest < 0 or (middle == 0 and rest) or (middle and rest % middle):
        raise LayoutError(
            f"{num_layers} layers on {num_stages} stages{f' ({given})' * bool(given)}: "
            f"{rest - (rest // middle) * middle if middle and rest > 0 else rest} unassigned"
        )
    return Layout.contiguous([fixed.get(index, rest // middle if middle else 0) for index in range(num_stages)])


def _check_length(pattern: re.Pattern[str], flat: str, text: str) -> None:
    """Refuse repeats before they are written out; raises LayoutError."""
    num_letters = 0
    for match in pattern.finditer(flat):
        # Python refuses to read a number of thousands of digits.
        if len(match.group(2)) > 9 or int(match.group(2)) > _MAX_REPEAT:
            raise LayoutError(f"layout {text[:60]!r}: expected at most {_MAX_REPEAT} repeats, got {match.group()[:60]!r}")
        num_letters += len(match.group(1)) * int(match.group(2))
    if num_letters > _MAX_LETTERS:
        raise LayoutError(f"layout {text[:60]!r}: expected at most {_MAX_LETTERS} letters, got {num_letters}")


def _run(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}" if count else ""


def _parse_chunk(token: str, text: str) -> Chunk:
    for letter in token:
        if letter not in _LETTERS:
            raise LayoutError(f"layout {text!r}: unknown letter {letter!r} in stage {token!r}, expected one of {_LETTERS}")
    if list(token) != sorted(token, key=_LETTERS.index):
        raise LayoutError(f"layout {text!r}: stage {token!r} is out of order, expected E before t before m before L")
    if token.count("E") > 1 or token.count("L") > 1:
        raise LayoutError(f"layout {text!r}: stage {token!r} holds more than one embedding (E) or loss (L)")
    return Chunk(embedding="E" in token, num_layers=token.count("t"), num_mtp=token.count("m"), loss="L" in token)


def _check_ends(layout: Layout) -> None:
    for name, letter, holders in (
        ("embedding", "E", [index for index, chunk in enumerate(layout.chunks) if chunk.embedding]),
        ("loss", "L", [index for index, chunk in enumerate(layout.chunks) if chunk.loss]),
    ):
        if len(holders) != 1:
            raise LayoutError(f"layout {layout.text!r}: expected exactly one {name} ({letter}), got {len(holders)}")
    filled = [index for index, chunk in enumerate(layout.chunks) if chunk != Chunk()]
    first, last = layout.chunks[filled[0]], layout.chunks[filled[-1]]
    if not first.embedding:
        raise LayoutError(f"layout {layout.text!r}: the first layer must be the embedding (E), got {first.text!r}")
    if not last.loss:
        raise LayoutError(f"layout {layout.text!r}: the last layer must be the loss (L), got {last.text!r}")


def _check_mtp(layout: Layout) -> None:
    holders = [index for index, chunk in enumerate(layout.chunks) if chunk.num_mtp]
    if not holders:
        return
    if len(holders) > 1:
        raise LayoutError(f"layout {layout.text!r}: MTP layers (m) must share one stage, found in {len(holders)}")
    if any(chunk.num_layers for chunk in layout.chunks[holders[0] + 1 :]):
        raise LayoutError(f"layout {layout.text!r}: a decoder layer (t) follows an MTP layer (m)")
    if holders[0] < len(layout.chunks) - layout.num_stages:
        raise LayoutError(f"layout {layout.text!r}: MTP layers (m) must be in the last virtual stage of their rank")
