"""The grid by several processes: their models are compiled side by side, and timed one at a time while all others wait.

Compiling every peer for every size takes most of the time of a grid and one core; timing needs the machine for itself.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from codetta.bench.grid import GridBench, Size, measure_grid, opened
from codetta.bench.run import Row
from codetta.errors import CodettaError

Job = tuple[str, str, tuple[Size, ...]]
Note = Callable[[str], None]
READY, ROWS, NOTE, FAILED = "ready", "rows", "note", "failed"


def measure_grid_with(workers: int, bench: GridBench, note: Note = lambda text: None) -> Iterator[list[Row]]:
    """As `measure_grid`, with so many processes. A process that fails is noted, and the others go on; the end is an error then."""
    jobs = bench.jobs()
    if workers <= 1 or len(jobs) <= 1:
        yield from measure_grid(bench, note)
        return
    failed: list[str] = []
    for first in range(0, len(jobs), workers):
        started = [_Worker(bench, job) for job in jobs[first : first + workers]]
        try:
            for worker in started:
                for _ in worker.until(READY, note):
                    pass
            for worker in started:
                yield from worker.timed(note)
                if worker.why is not None:
                    failed.append(worker.job)
        finally:
            for worker in started:
                worker.end()
    if failed:
        raise CodettaError(f"not everything was measured: {', '.join(failed)}")


class _Worker:
    """A process that measures one job."""

    def __init__(self, bench: GridBench, job: Job) -> None:
        spawn = multiprocessing.get_context("spawn")  # a GPU cannot be shared with a forked process
        self.job = f"{job[0]}, {job[1]}"
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_work, args=(bench, job, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.why: str | None = None

    def until(self, last: str, note: Note) -> Iterator[Any]:
        """What the process sends, without its notes, until `last` comes or the process ends."""
        while self.why is None:
            try:
                kind, value = self.pipe.recv()
            except EOFError:
                self.process.join()
                kind, value = FAILED, f"its process ended with {self.process.exitcode}"
            if kind == FAILED:
                self.why = value
                note(f"{self.job}: {value}")
            elif kind == NOTE:
                note(value)
            elif kind == last:
                return
            else:
                yield value

    def timed(self, note: Note) -> Iterator[list[Row]]:
        if self.why is None:
            self.pipe.send(READY)
            yield from self.until(READY, note)

    def end(self) -> None:
        self.pipe.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.terminate()


def _work(bench: GridBench, job: Job, pipe: Connection) -> None:
    """Warm all sizes of the job, wait for a turn, time them."""
    name, which, sizes = job
    try:
        with opened(bench, name, which, lambda text: pipe.send((NOTE, text))) as measurement:
            warm = []
            for size in sizes:
                if measurement.warm(size):
                    warm.append(size)
                measurement.rest()
            pipe.send((READY, None))
            pipe.recv()
            for size in warm:
                pipe.send((ROWS, measurement.timed(size)))
        pipe.send((READY, None))  # behind the model: its memory is free for the next
    except EOFError:  # nobody waits for it any more
        pass
    except Exception as error:
        pipe.send((FAILED, f"{type(error).__name__}: {error}"))
