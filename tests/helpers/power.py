"""What may be on a disk after a power failure: a record of a folder's changes, and every state that POSIX allows.

    with Recorder(folder) as recorder: ...                the code under test writes to the folder
    for moment in recorder.moments: moment.states()       each a tree that a machine may come up with

The content of a file survives from its last fsync on, its name from the last fsync of the folder that it is in. What is
not synced yet may be there or not, in any order: names of one folder independently of each other and of other folders,
contents whole, as at the last fsync, empty, cut short, or as zeros. A rename is one change: the name is the old or the
new one. Changes are seen between the operations of `pretrain.utils.io`, and fsync as the call that it is.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pretrain.utils import io

Change = tuple[str | None, str | None, int]
"""Old name, new name (None: none), and number of the file or folder."""
MAX_STATES = 64
"""Of one moment: subsets of changes beyond that are left out, singles and all but one kept."""


@dataclass
class Node:
    """A file or a folder.

    Attributes:
        content: Bytes of a file now; None: a folder.
        durable: Bytes at the last fsync; None: there was none.
        names: Of a folder, durable: name to number.
        changes: Of a folder, since its last fsync, in order.
    """

    content: bytes | None
    durable: bytes | None = None
    names: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def contents(self) -> list[bytes]:
        """Returns what a file may hold after a power failure."""
        assert self.content is not None
        if self.durable == self.content:
            return [self.content]
        found = [self.content, b"", self.content[: len(self.content) // 2], bytes(len(self.content))]
        return list(dict.fromkeys(found if self.durable is None else [self.durable, *found]))

    def listings(self) -> list[dict[str, int]]:
        """Returns the names that a folder may hold: those that are durable, and any of the changes since."""
        number = len(self.changes)
        chosen = itertools.chain.from_iterable(
            itertools.combinations(range(number), size)
            for size in sorted(range(number + 1), key=lambda n: min(n, number - n))
        )
        found = []
        for subset in itertools.islice(chosen, MAX_STATES):
            names = dict(self.names)
            for place in subset:
                _apply(names, self.changes[place])
            if names not in found:
                found.append(names)
        return found


def _apply(names: dict[str, int], change: Change) -> None:
    old, new, number = change
    if old is not None and names.get(old) == number:
        del names[old]
    elif old is not None:
        return  # what it renames or removes is not there
    if new is not None:
        names[new] = number


@dataclass
class Moment:
    """A point between two operations.

    Attributes:
        before: The operation that came next.
        nodes: All files and folders, by number; 0 is the folder that is recorded.
    """

    before: str
    nodes: dict[int, Node]

    def states(self) -> Iterator[dict[str, bytes | None]]:
        """Yields each tree that may be left: path to content, None for a folder."""
        yield from self._states_of(0, "")

    def _states_of(self, number: int, path: str) -> Iterator[dict[str, bytes | None]]:
        node = self.nodes[number]
        if node.content is not None:
            yield from ({path: content} for content in node.contents())
            return
        for names in node.listings():
            below = [
                list(self._states_of(child, f"{path}/{name}".lstrip("/"))) for name, child in sorted(names.items())
            ]
            for choice in itertools.islice(itertools.product(*below), MAX_STATES):
                merged: dict[str, bytes | None] = {path: None} if path else {}
                for part in choice:
                    merged |= part
                yield merged


class Recorder:
    """Watches the changes of a folder, which is taken to be durable itself, with what is in it at the beginning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moments: list[Moment] = []
        self._nodes: dict[int, Node] = {}
        self._numbers: dict[int, int] = {}
        self._current: dict[int, dict[str, int]] = {}

    def __enter__(self) -> "Recorder":
        self._real_fsync = os.fsync
        self._look()
        for node in self._nodes.values():
            node.durable = node.content
        for number, names in self._current.items():
            self._nodes[number].names, self._nodes[number].changes = dict(names), []
        os.fsync = self._fsync  # type: ignore[assignment]
        io.set_fault_hook(self._before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync = self._real_fsync
        io.set_fault_hook(None)
        self._note("the end")

    def _before(self, operation: str, path: Path) -> None:
        self._note(f"{operation} {path.name}")

    def _fsync(self, descriptor: Any) -> None:
        self._real_fsync(descriptor)
        self._look()
        number = self._numbers.get(os.fstat(descriptor).st_ino)
        if number is not None:
            node = self._nodes[number]
            node.durable = node.content
            if node.content is None:
                node.names, node.changes = dict(self._current[number]), []

    def _note(self, before: str) -> None:
        self._look()
        copies = {
            number: Node(node.content, node.durable, dict(node.names), list(node.changes))
            for number, node in self._nodes.items()
        }
        self.moments.append(Moment(before, copies))

    def _look(self) -> None:
        """Takes in what has changed since the last look. Inodes that came free may be given again: names tell."""
        seen: dict[int, dict[str, int]] = {}
        self._list(self.folder, seen)
        for number, names in seen.items():
            before = self._current.get(number, {})
            gone = {child: name for name, child in before.items() if names.get(name) != child}
            for name, child in names.items():
                if before.get(name) != child:
                    self._nodes[number].changes.append((gone.pop(child, None), name, child))
            removed = [(name, child) for child, name in gone.items() if name not in names]  # else: replaced, at once
            self._nodes[number].changes += [(name, None, child) for name, child in removed]
        self._current = seen
        alive = {child for names in seen.values() for child in names.values()} | {0}
        self._numbers = {inode: number for inode, number in self._numbers.items() if number in alive}

    def _list(self, path: Path, seen: dict[int, dict[str, int]]) -> int:
        inode = path.stat().st_ino
        number = self._numbers.setdefault(inode, len(self._nodes))
        content = None if path.is_dir() else path.read_bytes()
        self._nodes.setdefault(number, Node(content)).content = content
        if content is None:
            seen[number] = {}
            for child in sorted(path.iterdir()):
                seen[number][child.name] = self._list(child, seen)
        return number


def write_state(folder: Path, state: dict[str, bytes | None]) -> Path:
    """Makes a folder of one state."""
    folder.mkdir()
    for name, content in state.items():
        path = folder / name
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)
    return folder
