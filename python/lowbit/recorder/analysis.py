# SPDX-License-Identifier: Apache-2.0
"""Analyse a folder of recordings: where every rank is, where ranks first differ, and which of them caused it.

Ranks of one program make the same calls in the same order, so records are compared by their sequence number, and
collectives by their number in the process group; clocks are not used. The culprits are the ranks outside of the largest
set that agrees. Of two sets of equal size, the one with the lowest rank is assumed to be right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from lowbit.recorder.folder import Folder
from lowbit.recorder.ring import Record, Recording

_ANY_SHAPE = {"c10d.gather", "c10d.scatter", "c10d.all_to_all", "c10d.all_to_all_single"}


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one process."""

    name: str
    rank: int
    path: str
    host: str
    pid: int
    is_alive: bool
    calls: int
    overwritten: int
    lost: int
    last_finished: Record | None
    unfinished: Record | None  # the oldest
    age_s: float | None  # age of `unfinished` now, at the dump, or at the last record of any rank
    failed: Record | None  # the last one


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between ranks. In ``records``, None means that the rank has no record there."""

    what: str  # "call" or "collective of group ..."
    number: int
    kind: str  # "op", "row", "dtype", "shape" or "missing"
    records: dict[int, Record | None]
    culprits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """The findings. ``verdict`` is one sentence, ``culprits`` the ranks that it blames."""

    folder: str
    ranks: tuple[RankState, ...]
    world: int
    call: Difference | None
    collective: Difference | None
    verdict: str
    culprits: tuple[int, ...]
    problems: tuple[str, ...]


def analyse(folder: Folder) -> Analysis:
    """Compare the recordings of a folder."""
    latest = max((last_seen(recording) for recording in folder.recordings), default=0)
    states = tuple(_state(recording, latest) for recording in sorted(folder.recordings, key=_order))
    chosen = _by_rank(folder.recordings)
    world = max([recording.world for recording in chosen.values()] + [rank + 1 for rank in chosen], default=0)
    call = _first_different_call({rank: of for rank, of in chosen.items() if of.pid})
    collective = _first_different_collective(chosen, world)
    verdict, culprits = _verdict(states, chosen, world, call, collective)
    return Analysis(folder.path, states, world, call, collective, verdict, culprits, folder.problems)


def last_seen(recording: Recording) -> int:
    """Return the wall-clock time of the last event in a recording."""
    moments = [max(record.start_ns, record.end_ns) for record in recording.records]
    return recording.wall(max([*moments, recording.taken_ns], default=recording.monotonic_ns))


def _order(recording: Recording) -> tuple[int, int, str]:
    return recording.rank if recording.rank >= 0 else 1 << 30, recording.pid, recording.path


def _state(recording: Recording, latest: int) -> RankState:
    finished = [record for record in recording.records if record.state == "finished"]
    failed = [record for record in recording.records if record.state == "failed"]
    last = {record.thread: record for record in recording.records}
    started = [
        record
        for record in recording.records
        if record.state == "started" and not (record.is_between_two and last[record.thread] is not record)
    ]  # gloo does not report the end of a receive, but the thread has made later calls
    unfinished = min(started, key=lambda record: record.start_ns, default=None)
    until = recording.wall(recording.taken_ns) if recording.taken_ns else latest
    age = None if unfinished is None else max(0.0, (until - recording.wall(unfinished.start_ns)) / 1e9)
    return RankState(
        recording.name, recording.rank, recording.path, recording.host, recording.pid, recording.is_alive,
        recording.calls, recording.overwritten, recording.lost, finished[-1] if finished else None, unfinished, age,
        failed[-1] if failed else None,
    )  # fmt: skip


def _by_rank(recordings: Iterable[Recording]) -> dict[int, Recording]:
    """Return one recording for each rank. A ring or a dump is preferred to one of torch's recorder, one with
    collectives to one without, and later ones to earlier ones."""

    def worth(recording: Recording) -> tuple[bool, bool, int]:
        collectives = any(record.is_collective for record in recording.records)
        return recording.pid > 0 and collectives, collectives, last_seen(recording)

    chosen: dict[int, Recording] = {}
    for recording in recordings:
        rank = recording.rank
        if rank >= 0 and (rank not in chosen or worth(recording) > worth(chosen[rank])):
            chosen[rank] = recording
    return dict(sorted(chosen.items()))


def _facts(record: Record) -> dict[str, Hashable]:
    facts: dict[str, Hashable] = {"op": record.op, "row": record.row}
    facts["dtype"] = tuple(tensor.dtype for tensor in record.tensors)
    if record.op not in _ANY_SHAPE:
        facts["shape"] = tuple(tensor.shape for tensor in record.tensors)
    return facts


def _difference(what: str, number: int, records: dict[int, Record | None]) -> Difference | None:
    """Return the difference between ranks at one position, with the ranks in the minority, or None if they agree."""
    told = {rank: None if record is None else _facts(record) for rank, record in records.items()}
    sets: defaultdict[str, list[int]] = defaultdict(list)
    for rank, facts in told.items():
        sets[repr(facts)].append(rank)
    if len(sets) < 2:
        return None
    present = [facts for facts in told.values() if facts is not None]
    kind = "missing"
    if len({repr(facts) for facts in present}) > 1:
        kinds = [name for name in present[0] if len({repr(facts.get(name)) for facts in present}) > 1]
        kind = kinds[0] if kinds else "op"
    right = max((ranks for facts, ranks in sets.items() if facts != "None"), key=lambda ranks: (len(ranks), -ranks[0]))
    return Difference(what, number, kind, records, tuple(rank for rank in sorted(told) if rank not in right))


def _first_different_call(chosen: dict[int, Recording]) -> Difference | None:
    """Compare the calls that every rank still has. A rank that is behind does not count as different."""
    if len(chosen) < 2:
        return None
    calls = {rank: {record.sequence: record for record in of.records} for rank, of in chosen.items()}
    end = min(of.calls for of in chosen.values())
    common = set.intersection(*(set(of) for of in calls.values()))
    for number in sorted(sequence for sequence in common if sequence < end):
        records = {rank: of[number] for rank, of in calls.items()}
        found = _difference("call", number, records)
        if found and not all(record.is_between_two for record in records.values()):
            return found
    return None


def _first_different_collective(chosen: dict[int, Recording], world: int) -> Difference | None:
    groups: defaultdict[str, dict[int, dict[int, Record]]] = defaultdict(dict)
    for rank, recording in chosen.items():
        for record in recording.records:
            if record.is_collective and record.group_sequence >= 0:
                groups[record.group].setdefault(rank, {})[record.group_sequence] = record
    found = []
    for group, of_ranks in groups.items():
        if group.endswith("default_pg"):  # its members are all ranks, including those without a recording
            of_ranks = {rank: of_ranks.get(rank, {}) for rank in range(world)}
        first = max(min(numbers) for numbers in of_ranks.values() if numbers)
        last = max(max(numbers) for numbers in of_ranks.values() if numbers)
        for number in range(first, last + 1):
            records = {rank: numbers.get(number) for rank, numbers in of_ranks.items()}
            difference = _difference(f"collective of group {group}", number, records)
            # A rank may be behind the others, as long as no rank waits for it.
            waiting = any(record is not None and record.state != "finished" for record in records.values())
            if difference and (difference.kind != "missing" or waiting):
                found.append(difference)
                break
    return min(found, key=lambda one: min(of.start_ns for of in one.records.values() if of), default=None)


def _verdict(
    states: tuple[RankState, ...],
    chosen: dict[int, Recording],
    world: int,
    call: Difference | None,
    collective: Difference | None,
) -> tuple[str, tuple[int, ...]]:
    if collective is not None:
        where = f"{collective.what}, number {collective.number}"
        who = _ranks(collective.culprits)
        if collective.kind != "missing":
            return f"{who}: another {collective.kind} than the other ranks in {where}", collective.culprits
        doing = "; ".join(_doing(rank, chosen, states) for rank in collective.culprits)
        return f"{who}: did not come to {where}, where the others wait: {doing}", collective.culprits
    stuck = [state for state in states if state.unfinished is not None and not state.unfinished.is_collective]
    if stuck:
        told = "; ".join(
            f"{state.name} is in {state.unfinished}, {_age(state)}" + ("" if state.is_alive else ", and gone")
            for state in stuck
        )
        return told, tuple(state.rank for state in stuck if state.rank >= 0)
    if call is not None:
        return f"{_ranks(call.culprits)}: another {call.kind} than the other ranks in call {call.number}", call.culprits
    failed = [state for state in states if state.failed is not None]
    if failed:
        told = "; ".join(f"{state.name} failed in {state.failed}" for state in failed)
        return told, tuple(state.rank for state in failed if state.rank >= 0)
    missing = tuple(rank for rank in range(world) if rank not in chosen)
    if missing and chosen:
        return f"{_ranks(missing)}: no recording; every call of the others has ended", missing
    waiting = [state for state in states if state.unfinished is not None]
    if waiting:
        return "; ".join(f"{state.name} waits in {state.unfinished}" for state in waiting), ()
    return "every recorded call has ended, and ranks agree", ()


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(numbers)


def _age(state: RankState) -> str:
    return f"for {'' if state.is_alive else 'at least '}{state.age_s:.1f} s"


def _doing(rank: int, chosen: dict[int, Recording], states: tuple[RankState, ...]) -> str:
    if rank not in chosen:
        return f"rank {rank} left no recording"
    state = next(state for state in states if state.path == chosen[rank].path)
    if state.unfinished is not None:
        return f"rank {rank} is in {state.unfinished}, {_age(state)}"
    last = f"its last call was {state.last_finished}" if state.last_finished else "it made no call"
    return f"rank {rank} is {'alive' if state.is_alive else 'gone'}, {last}"
