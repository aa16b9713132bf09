"""Carry values besides tensors from one nest into another (`NestValues.of`)."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.numbered_state import entries_of, parts_of

# Lists in the state of torch's schedulers with a value for each group (torch.optim.lr_scheduler, 2.13).
BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))


class NestValues:
    """Takes those values from a source's nest that another nest has as well.

    A dictionary has its own keys. All else without tensors is the source's as it is there. Where both have a tensor in
    a list, items are taken by their places.
    """

    def __init__(self, tensors: Iterable[str]) -> None:
        """Take the names of the tensors of both nests."""
        self._tensors = sorted(set(tensors))
        self._left_alone: dict[int, Any] = {}

    def leave_alone(self, nodes: Iterable[Any]) -> None:
        """Take dictionaries of optimizers: they have values that go with parameters."""
        self._left_alone |= {id(node): node for node in nodes}

    def of(self, node: Any, source: Any, path: str) -> Any:
        """Return a part of a nest with the source's values. path: what names in it begin with."""
        if id(node) in self._left_alone:
            return node
        if entries_of(node) is not None and entries_of(source) is not None:
            return {**node, "dict": self.entries(node, source, path)}
        items, of_source = _items(node), _items(source)
        if self._is_plain(node) and self._is_plain(source) and not self._has_tensor(path):
            return source
        if items is not None and of_source is not None and len(items) == len(of_source):
            pairs = enumerate(zip(items, of_source))
            carried = [self.of(own, other, f"{path}{place}.") for place, (own, other) in pairs]
            return carried if isinstance(node, list) else {"tuple": carried}
        return node

    def entries(self, node: Any, source: Any, path: str) -> list[list[Any]]:
        """Return the entries of a dictionary with the source's values."""
        values = {json.dumps(entry[0]): entry[1] for entry in entries_of(source) or () if len(entry) == 2}
        entries = []
        for entry in node["dict"]:
            text = json.dumps(entry[0])
            if len(entry) == 2 and text in values:
                key, own, other = entry[0], entry[1], values[text]
                is_by_group = isinstance(key, str) and key in BY_GROUP
                if is_by_group and isinstance(own, list) and isinstance(other, list):
                    entry = [key, self._for_groups(own, other, f"{path}{key}.")]
                else:
                    entry = [key, self.of(own, other, f"{path}{key}.")]
            entries.append(entry)
        return entries

    def _has_tensor(self, path: str) -> bool:
        place = bisect_left(self._tensors, path)
        return place < len(self._tensors) and self._tensors[place].startswith(path)

    def _is_plain(self, node: Any) -> bool:
        """Tell whether a part of a nest is no optimizer, and lists no tensor. A tensor with a key of text may have no
        entry.
        """
        if isinstance(node, list):
            return all(map(self._is_plain, node))
        if not isinstance(node, dict):
            return True
        if id(node) in self._left_alone or "tensor" in node or any(len(entry) == 1 for entry in entries_of(node) or ()):
            return False
        return all(map(self._is_plain, node.values()))

    def _for_groups(self, own: list[Any], source: list[Any], path: str) -> list[Any]:
        """Return a scheduler's values as the source has them; its own if more or fewer groups have unlike ones."""
        if len(own) == len(source):
            return self.of(own, source, path)  # type: ignore[no-any-return]
        return [source[0]] * len(own) if source and all(value == source[0] for value in source) else own

    def require_none_by_group(self, root: Any, source: Any, regrouped: Sequence[tuple[int, int]], where: str) -> None:
        """Raise MapError for values that a scheduler may have for each group, where the groups of a nest are others.

        Args:
            regrouped: for the optimizers whose groups are others, how many there are in the nest, and in the source.
        """
        for path, own, items in self._lists_in_both(root, source, "") if regrouped else ():
            are_unlike = any(item != items[0] for item in items)
            are_known = path.rpartition(".")[2] in BY_GROUP
            if not are_known:
                are_unlike = (
                    (len(own), len(items)) in regrouped and own != items and (are_unlike or len(own) != len(items))
                )
            if are_unlike:
                raise MapError(
                    f"a scheduler {'has' if are_known else 'may have'} values for groups of parameters, which the other"
                    " checkpoint has in another order",
                    expected="the same groups in the same order",
                    got=path,
                    where=where,
                    remedy="give --like a checkpoint with the groups in this order, or convert without --like",
                )

    def _lists_in_both(self, node: Any, source: Any, path: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
        """Yield the paths and items of lists that both nests have beside optimizers."""
        if id(node) in self._left_alone:
            return
        of_source = dict(parts_of(source))
        for key, value in parts_of(node):
            if key in of_source:
                own, items = _items(value), _items(of_source[key])
                if own is not None and items is not None:
                    yield f"{path}{key}", own, items
                yield from self._lists_in_both(value, of_source[key], f"{path}{key}.")


def _items(node: Any) -> list[Any] | None:
    """Return the items of a list or tuple; None if a part of a nest is none."""
    items = node.get("tuple") if isinstance(node, dict) else node
    return items if isinstance(items, list) else None
