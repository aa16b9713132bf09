"""Maps that are applied one after another: which boxes of the first tensors are which boxes of the last ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from reshard_mpi.formats.columns import Kind
from reshard_mpi.mapping.made import Constant, Made
from reshard_mpi.mapping.pairs import Pair, Place, TargetShape
from reshard_mpi.planning.cover import Pieces
from reshard_mpi.planning.mapped import Move
from reshard_mpi.text import shortened


class Composition:
    """Says of tensors that several maps make one after another what they are made of at the beginning.

    Tensors that are made alike get one shape, so that they can be told by it.
    """

    def __init__(self) -> None:
        self._shapes: dict[object, TargetShape] = {}
        self._pieces: dict[int, Pieces] = {}
        self._kept: list[TargetShape] = []  # what identities are of

    def of(self, made: Iterable[Made], before: Mapping[str, Made | Constant]) -> Iterator[Made]:
        """Yield tensors, each as made of what the tensors `before` are made of; `before` names all that it needs."""
        for tensor in made:
            places = dict.fromkeys(pair.source for pair in tensor.shape.pairs)
            recipes = {place: before[tensor.sources[place]] for place in places}
            sources: dict[Place, str] = {}
            place_of: dict[tuple[Place, Place], Place] = {}
            for place, recipe in recipes.items():
                for inner, name in recipe.sources.items() if isinstance(recipe, Made) else ():
                    place_of[place, inner] = Place(len(place_of), ())
                    sources[place_of[place, inner]] = name
            key = id(tensor.shape), tuple(_key(place, recipe) for place, recipe in recipes.items())
            if key not in self._shapes:
                self._kept += [tensor.shape, *(recipe.shape for recipe in recipes.values() if isinstance(recipe, Made))]
                self._shapes[key] = self._shape(tensor.shape, recipes, place_of)
            wheres = dict.fromkeys(recipe.where for recipe in recipes.values() if recipe.where)
            where = ", then ".join(filter(None, (shortened(list(wheres)) if wheres else "", tensor.where)))
            yield tensor._replace(shape=self._shapes[key], sources=sources, where=where)

    def _shape(
        self,
        shape: TargetShape,
        recipes: Mapping[Place, Made | Constant],
        place_of: Mapping[tuple[Place, Place], Place],
    ) -> TargetShape:
        pairs, zeros = [], list(shape.zeros)
        for pair in shape.pairs:
            recipe, after = recipes[pair.source], Move(pair.region, pair.to, pair.order)
            for number, _ in self._pieces_of(recipe.shape).meeting(pair.region) if isinstance(recipe, Made) else ():
                inner = recipe.shape.pairs[number]
                move = Move(inner.region, inner.to, inner.order).then(after)
                if move is not None:
                    pairs.append(Pair(place_of[pair.source, inner.source], *move))
            if isinstance(recipe, Made) or not any(recipe.element):
                moved = (Move(box, box).then(after) for box in recipe.shape.zeros)
                zeros += [move.to for move in moved if move is not None]
        return TargetShape(shape.shape, tuple(pairs), tuple(zeros))

    def _pieces_of(self, shape: TargetShape) -> Pieces:
        if id(shape) not in self._pieces:
            self._pieces[id(shape)] = Pieces([pair.to for pair in shape.pairs])
        return self._pieces[id(shape)]


def _key(place: Place, recipe: Made | Constant) -> object:
    """Return what is the same of tensors that are made alike."""
    if isinstance(recipe, Made):
        return place, id(recipe.shape), tuple(recipe.sources)
    return place, Kind(*recipe.kind), recipe.element
