"""What a job would do at each change of its number of GPUs: who stays, which layers travel, how many micro-batches. Pure.

Ranks are numbered as Megatron does (tensor parallel fastest, then data, then pipeline), and GPUs leave from the end of
that order. It must not know files, consoles or process groups.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_dyn.cli.arguments import MAX_MICROBATCHES, MAX_STAGES
from megatron_dyn.cli.errors import InputError
from megatron_dyn.records import Layout

_POINT = re.compile(r"\{?\s*\"?step\"?\s*[:=]?\s*(\d{1,9})\s*,\s*\"?size\"?\s*[:=]?\s*(\d{1,9})\s*\}?", re.ASCII)
_SHAPE = re.compile(
    r"\"?(\d{1,9})\"?\s*(?:->|:|=)\s*[\[(]?\s*(\d{1,9})\s*[,x]\s*(\d{1,9})\s*(?:[,x]\s*(\d{1,9})\s*)?[\])]?", re.ASCII
)
_MAX_GPUS = 131_072
"""More than any job has: what each rank holds is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """From `step` on the job has `size` GPUs; 0: it stops."""

    step: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How a number of GPUs is used."""

    pp: int
    tp: int
    dp: int

    @property
    def size(self) -> int:
        """GPUs that it takes."""
        return self.pp * self.tp * self.dp

    def place(self, global_rank: int) -> tuple[int, int]:
        """(pipeline stage, tensor-parallel rank) of a global rank."""
        return global_rank // (self.tp * self.dp), global_rank % self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How the global batch, which never changes, comes in micro-batches."""

    global_batch: int
    micro_sizes: tuple[int, ...]
    """Sizes of a micro-batch that may be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """One row of the dry run. Ranks are global."""

    step: int
    size: int
    grid: Grid | None
    """None: the job stops."""
    layout: Layout | None
    kept: range
    released: range
    joined: range
    moved_layers: tuple[int, ...]
    """Layers that at least one rank has to get; from other ranks, or from a checkpoint where none is left."""
    micro_batch: int
    """Samples in a micro-batch; 0 when the job stops."""
    num_microbatches: int
    """Of a step on each data-parallel rank."""


def read_points(text: str) -> tuple[Point, ...]:
    """Read `[{"step": 0, "size": 8}, {"step": 100, "size": 4}]`, or without quotes and colons: `[{step0,size8}, ...]`.

    Raises InputError that names the entry, what was expected and what was found.
    """
    body = text.strip().removeprefix("[").removesuffix("]").strip()
    entries = re.split(r"(?<=\})\s*,\s*", body) if body else []
    points = []
    for index, entry in enumerate(entries):
        if (match := _POINT.fullmatch(entry.strip())) is None:
            raise InputError(f"--resize: entry {index}: expected a step and a size such as {{step0,size8}}, got {entry[:60]!r}")
        points.append(Point(step=int(match.group(1)), size=int(match.group(2))))
    if not points:
        raise InputError("--resize: expected at least one entry such as {step0,size8}, got none")
    for before, point in pairwise(points):
        if point.step <= before.step:
            raise InputError(f"--resize: expected ascending steps, got {point.step} after {before.step}")
        if before.size == 0:
            raise InputError(f"--resize: step {point.step}: the job stopped at step {before.step} (size 0)")
    return tuple(points)


def read_grids(text: str) -> Mapping[int, Grid]:
    """Read `{"8": [4, 1, 2]}`, `8->(4,1,2)` or `8=4x1x2`: by size pipeline, tensor and data parallelism.

    Data parallelism may be left out: it is what remains. Raises InputError that names the size, expected and actual.
    """
    grids: dict[int, Grid] = {}
    body = text.strip().removeprefix("{").removesuffix("}")
    entries = re.split(r"[,;\s]\s*(?=\"?\d+\"?\s*(?:->|:|=))", body.strip())
    for entry in entries:
        if (match := _SHAPE.fullmatch(entry.strip())) is None:
            raise InputError(f"--sizes: expected entries such as 8->(4,1,2), GPUs to (pp,tp,dp), got {entry[:60]!r}")
        size, pp, tp = (int(match.group(group)) for group in (1, 2, 3))
        if size in grids:
            raise InputError(f"--sizes: size {size} is given twice")
        if pp * tp < 1 or size < 1 or size % (pp * tp):
            raise InputError(f"--sizes: size {size}: expected a multiple of pp * tp = {pp} * {tp} = {pp * tp}")
        if size > _MAX_GPUS or pp > MAX_STAGES:
            raise InputError(f"--sizes: size {size}: expected at most {_MAX_GPUS} GPUs and {MAX_STAGES} stages, got pp {pp}")
        dp = int(match.group(4)) if match.group(4) else size // (pp * tp)
        if pp * tp * dp != size:
            raise InputError(f"--sizes: size {size}: expected pp * tp * dp = {size}, got {pp} * {tp} * {dp} = {pp * tp * dp}")
        grids[size] = Grid(pp=pp, tp=tp, dp=dp)
    return grids


def micro_batch_size(batch: Batch, *, num_gpus: int, model_parallel: int) -> int:
    """The largest allowed micro-batch that cuts a data-parallel rank's share of the global batch without a rest.

    A replica of the model is `model_parallel` GPUs, so the batch is shared by `num_gpus / model_parallel` ranks, not by
    all GPUs (DeepSpeed divided by all of them, its pull request 8395). Raises InputError when nothing fits.
    """
    if num_gpus < 1 or model_parallel < 1 or num_gpus % model_parallel:
        raise InputError(f"size {num_gpus}: expected a multiple of the {model_parallel} GPUs of a replica (pp * tp)")
    num_replicas = num_gpus // model_parallel
    if batch.global_batch % num_replicas:
        raise InputError(
            f"size {num_gpus}: global batch {batch.global_batch} is no multiple of {num_replicas} data-parallel ranks"
        )
    share = batch.global_batch // num_replicas
    fitting = [size for size in batch.micro_sizes if share % size == 0]
    if not fitting:
        raise InputError(
            f"size {num_gpus}: expected a micro-batch that divides {share}, a data-parallel rank's share of global batch "
            f"{batch.global_batch}, got {list(batch.micro_sizes)}"
        )
    return max(fitting)


def dry_run(
    points: Sequence[Point], grids: Mapping[int, Grid], batch: Batch, layout_of: Callable[[Grid, int], Layout]
) -> tuple[Resize, ...]:
    """A row for each point. `layout_of` splits the layers for a grid and its number of micro-batches.

    Raises InputError that names the size that cannot be.
    """
    rows: list[Resize] = []
    for point in points:
        before = rows[-1] if rows else None
        rows.append(_row(point, before, grids, batch, layout_of))
    return tuple(rows)


def released_nodes(row: Resize, gpus_per_node: int) -> range:
    """Nodes whose GPUs all leave with this row; one that keeps a rank stays."""
    after = -(-row.size // gpus_per_node)
    before = -(-(row.size + len(row.released)) // gpus_per_node)
    return range(after, max(after, before))


def _row(
    point: Point,
    before: Resize | None,
    grids: Mapping[int, Grid],
    batch: Batch,
    layout_of: Callable[[Grid, int], Layout],
) -> Resize:
    had = before.size if before is not None else point.size
    kept, released, joined = (
        range(min(had, point.size)),
        range(point.size, max(had, point.size)),
        range(had, max(had, point.size)),
    )
    grid, layout, micro_batch, num_microbatches = None, None, 0, 0
    if point.size:
        if point.size not in grids:
            known = ", ".join(str(size) for size in sorted(grids))
            raise InputError(f"--resize: step {point.step}: size {point.size} is not in --sizes, which has {known}")
        grid = grids[point.size]
        micro_batch = micro_batch_size(batch, num_gpus=grid.size, model_parallel=grid.pp * grid.tp)
        num_microbatches = batch.global_batch // grid.dp // micro_batch
        if num_microbatches > MAX_MICROBATCHES:
            raise InputError(f"size {point.size}: expected at most {MAX_MICROBATCHES} micro-batches, got {num_microbatches}")
        # The same grid needs no new plan: nothing about the costs has changed.
        layout = before.layout if before is not None and before.grid == grid else layout_of(grid, num_microbatches)
    return Resize(
        step=point.step,
        size=point.size,
        grid=grid,
        layout=layout,
        kept=kept,
        released=released,
        joined=joined,
        moved_layers=_moved_layers(before, grid, layout),
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
    )


def _moved_layers(before: Resize | None, grid: Grid | None, layout: Layout | None) -> tuple[int, ...]:
    if before is None or grid is None or layout is None:
        return ()
    held = _pieces(before.grid, before.layout)
    needed = _pieces(grid, layout)
    missing = {layer for rank, pieces in needed.items() for layer, _, _ in pieces - held.get(rank, set())}
    return tuple(sorted(missing))


def _pieces(grid: Grid | None, layout: Layout | None) -> dict[int, set[tuple[int, int, int]]]:
    """By global rank: (layer, tensor-parallel rank, tensor-parallel size) of all that it holds."""
    if grid is None or layout is None:
        return {}
    pieces = {}
    for rank in range(grid.size):
        stage, tp_rank = grid.place(rank)
        pieces[rank] = {(layer, tp_rank, grid.tp) for layer in layout.layers_of_stage(stage)}
    return pieces
