"""The plan of one target rank: which parameters, from where, what must agree, and the proof that nothing is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.cases import Case, cases
from support.in_memory import check_every_element, entry, manifest, manifests_of, strategy_of

from reshard_mpi.errors import CoverageError, DisagreementError, LayoutError, ReshardError, StrategyError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.comparison_choice import ReplicaGroup, partition_for
from reshard_mpi.planning.plan_target import plan_target
from reshard_mpi.planning.rank_choice import Accumulated, Replicas, is_partial_sum, needed_ranks
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.source_flaws import UnusableShard
from reshard_mpi.planning.target_tensors import Policy, TargetTensors
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import (
    Strategy,
    Unlisted,
    find_or_follow,
    is_dropped,
    named_after,
    require_common_parameters,
)

ROWS, COLUMNS, WHOLE = Placement((2,), ((0,), ())), Placement((2,), ((), (0,))), Placement((2,))
LINE = Placement((2,), ((0,),))


def one_rank(**placements: Placement) -> Strategy:
    """Return a target strategy of a single rank that lists these parameters, or `w` alone."""
    return Strategy(
        1, 1, {name: (placement,) for name, placement in (placements or {"w": Placement((1,))}).items()}, origin="dst"
    )


def two_ranks(**placements: Placement) -> Strategy:
    return Strategy(2, 1, {name: (placement,) for name, placement in placements.items()}, origin="src")


def shards(*ranks: Mapping[str, tuple[int, ...]]) -> dict[int, Manifest]:
    """Return shards of ranks 0, 1 ... that hold float32 tensors of these shapes."""
    return {rank: manifest(rank, *(entry(*item) for item in tensors.items())) for rank, tensors in enumerate(ranks)}


def tensors_of(
    source: Strategy,
    target: Strategy,
    manifests: Mapping[int, Manifest],
    rank: int = 0,
    unlisted: Unlisted = Unlisted.FOLLOW,
    strict: bool = False,
    lost: Iterable[UnusableShard] = (),
    replicas: Replicas = Replicas.ANY,
) -> TargetTensors:
    unusable = {shard.rank: shard for shard in lost}
    return TargetTensors(
        source, target, rank, manifests, unusable, Policy(unlisted, strict, replicas, Accumulated.REFUSE)
    )


def planned(*arguments: object, **options: object) -> RankPlan:
    return plan_target(tensors_of(*arguments, **options), "the table")


def boxes(plan: RankPlan) -> dict[str, str]:
    return {tensor.spec.name: str(tensor.spec.box) for tensor in plan.tensors}


def refusal(kind: type[ReshardError], *arguments: object, **options: object) -> ReshardError:
    with pytest.raises(kind) as refused:
        planned(*arguments, **options)
    assert refused.value.expected and refused.value.got and refused.value.remedy
    return refused.value


# The whole of it: random strategies, every element


@given(cases(), st.data())
def test_every_element_of_the_target_has_one_source(case: Case, data: st.DataObject) -> None:
    source, target = strategy_of(case.src), strategy_of(case.dst)
    every = manifests_of(case.src, case.tensors)
    rank = data.draw(st.sampled_from(range(target.world_size)))
    needed = needed_ranks(source, target, rank, names=(), available=every, unlisted=Unlisted.FOLLOW)
    opened = {other: every[other] for other in needed}
    if source.world_size == target.world_size:
        opened[rank] = every[rank]
    for manifests in (opened, every):
        check_every_element(case, planned(source, target, manifests, rank))


@given(cases(unlisted=False, empty=False), st.data())
def test_what_no_opened_shard_holds_is_a_hole(case: Case, data: st.DataObject) -> None:
    """One part of one tensor is taken out of the shards, or with them: the error names tensor, box and ranks."""
    source, target = strategy_of(case.src), strategy_of(case.dst)
    every = manifests_of(case.src, case.tensors)
    rank = data.draw(st.sampled_from(range(target.world_size)))
    wanted = planned(source, target, every, rank).tensors
    assume(wanted)
    tensor = data.draw(st.sampled_from(wanted))
    name = tensor.spec.name
    item = data.draw(st.sampled_from(tensor.reads))
    (origin,) = source.find(name)
    holders = list(origin.holders(origin.piece(item.source_rank)))
    assume(len(tensor.reads) > 1)  # of a tensor that is nowhere nobody can tell that it was ever saved
    if data.draw(st.booleans()):
        spoiled = {other: shard for other, shard in every.items() if other not in holders}
        got = "shard missing"
    else:
        spoiled = dict(every)
        for other in holders:
            left = (manifests for key, manifests in every[other].tensors.items() if key != name)
            spoiled[other] = manifest(other, *left)
        got = "shards without the tensor"
    error = refusal(CoverageError, source, target, spoiled, rank)
    if error.problem.endswith(f"of {name!r} that target rank {rank} needs"):
        assert f"box {item.region} on " in error.expected
        assert all(str(holder) in error.expected for holder in holders[:8])
        assert error.got == got
    else:  # with the shards went another tensor of theirs, which came first
        assert got == "shard missing"


def test_parts_that_do_not_add_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: should the algebra ever lose a part, nothing is written."""
    meeting = Layout.pieces_meeting
    monkeypatch.setattr(Layout, "pieces_meeting", lambda layout, box: list(meeting(layout, box))[1:])
    with pytest.raises(CoverageError) as refused:
        planned(two_ranks(w=ROWS), one_rank(), shards({"w": (2, 6)}, {"w": (2, 6)}))
    assert refused.value.problem == "the sources of 'w' do not cover what target rank 0 holds"
    assert (refused.value.expected, refused.value.got) == ("24 elements of box [0:4, 0:6]", "12 elements in 1 parts")


def test_one_part_twice_in_the_place_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many elements as are wanted, but some of them twice."""
    meeting = Layout.pieces_meeting
    monkeypatch.setattr(Layout, "pieces_meeting", lambda layout, box: [next(meeting(layout, box))] * 2)
    with pytest.raises(CoverageError, match="do not cover") as refused:
        planned(two_ranks(w=ROWS), one_rank(), shards({"w": (2, 6)}, {"w": (2, 6)}))
    assert refused.value.got == "24 elements in 2 parts"


# Which parameters


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("w", []),
        ("moments.w", ["w"]),
        ("adam.moment1.layer.w", ["moment1.layer.w", "layer.w", "w"]),
        ("a..b", [".b", "b"]),
    ],
)
def test_what_a_name_may_be_named_after(name: str, bases: list[str]) -> None:
    assert list(named_after(name)) == bases


@pytest.mark.parametrize(
    ("name", "followed"),
    [
        ("w", ROWS),
        ("moments.w", ROWS),
        ("adam_m.w", COLUMNS),  # listed itself
        ("opt.adam_m.w", COLUMNS),  # the longest name it is named after
        ("b", None),
        ("accum.b", None),
        ("moments_w", None),
        ("decoder.w", None),  # a module of its own
        ("decoder.moments.w", ROWS),
    ],
)
def test_unlisted_names_follow_the_longest_listed_tail(name: str, followed: Placement | None) -> None:
    strategy = two_ranks(**{"w": ROWS, "adam_m.w": COLUMNS})
    assert find_or_follow(strategy, name, lambda base: True) == (() if followed is None else (followed,))


def test_a_count_of_steps_goes_like_no_parameter() -> None:
    strategy = Strategy(2, 1, {}, (("model.*", ROWS),))
    state = "optimizer.state.model.embed.weight"
    assert find_or_follow(strategy, f"{state}.exp_avg", lambda base: True) == (ROWS,)
    assert find_or_follow(strategy, f"{state}.step", lambda base: True) == ()
    assert find_or_follow(two_ranks(**{"model.step": ROWS}), "ema.model.step", lambda base: True) == (ROWS,)


def test_a_tail_of_another_shape_is_passed_over() -> None:
    strategy = two_ranks(**{"w": ROWS, "adam_m.w": COLUMNS})
    assert find_or_follow(strategy, "opt.adam_m.w", lambda base: base == "w") == (ROWS,)
    assert find_or_follow(strategy, "opt.adam_m.w", lambda base: False) == ()


def test_a_rule_for_every_name_comes_after_following() -> None:
    strategy = Strategy(2, 1, {}, (("layer.*", ROWS), ("*", WHOLE)))
    assert find_or_follow(strategy, "moments.layer.w", lambda base: True) == (ROWS,)
    assert find_or_follow(strategy, "moments.layer.w", lambda base: False) == (WHOLE,)
    assert find_or_follow(strategy, "b", lambda base: True) == (WHOLE,)
    # Any other rule lists the names it matches, so they need not follow.
    strategy = Strategy(2, 1, {}, (("moments.*", COLUMNS), ("layer.*", ROWS)))
    assert find_or_follow(strategy, "moments.layer.w", lambda base: True) == (COLUMNS,)


def test_the_rank_list_knows_that_a_rule_for_every_name_comes_after_following() -> None:
    """The target holds rows of `moments.w`, as of `w`, not columns as the last rule says."""
    source = two_ranks(**{"w": ROWS, "moments.w": ROWS})
    target = Strategy(2, 1, {}, (("w", ROWS), ("*", COLUMNS)))
    manifests = {"w": (2, 6), "moments.w": (2, 6)}
    for rank in (0, 1):
        plan = planned(source, target, shards(manifests, manifests), rank)
        listed = needed_ranks(source, target, rank, names=(), available=range(2), unlisted=Unlisted.FOLLOW)
        assert listed == plan.read_ranks == (rank,)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("accu_grads.w", True),
        ("opt.grad_sum.layer.w", True),
        ("accu_grads", False),
        ("w.grad_sum", False),
        ("w", False),
    ],
)
def test_partial_sums_are_told_by_their_prefix(name: str, is_one: bool) -> None:
    assert is_partial_sum(name) == is_one


def test_strategies_without_a_common_parameter_are_refused() -> None:
    source, other = two_ranks(w=ROWS), one_rank(v=Placement((1,)))
    with pytest.raises(StrategyError, match="no parameter in common") as refused:
        require_common_parameters(source, other)
    assert refused.value.expected == "parameters of src, such as 'w'"
    assert refused.value.got == "1 others, such as 'v'"
    assert refused.value.where == "dst"
    for target in (one_rank(w=Placement((1,))), one_rank(**{"moments.w": Placement((1,))}), Strategy(1, 1, {})):
        if target.parameters:
            require_common_parameters(source, target)
            require_common_parameters(target, source)
    require_common_parameters(source, Strategy(1, 1, {}, (("v", Placement((1,))),)))


UNLISTED = {"w": (2, 6), "moments.w": (2, 6), "b": (3,)}


@pytest.mark.parametrize(
    ("unlisted", "expected"),
    [
        (Unlisted.FOLLOW, {"w": "[0:4, 3:6]", "moments.w": "[0:4, 3:6]", "b": "[0:3]"}),
        (Unlisted.REPLICATE, {"w": "[0:4, 3:6]", "moments.w": "[0:4, 0:6]", "b": "[0:3]"}),
        (Unlisted.DROP, {"w": "[0:4, 3:6]"}),
    ],
)
def test_what_becomes_of_names_that_the_target_does_not_list(unlisted: Unlisted, expected: dict[str, str]) -> None:
    source, target = two_ranks(w=ROWS), two_ranks(w=COLUMNS)
    assert boxes(planned(source, target, shards(UNLISTED, UNLISTED), 1, unlisted)) == expected


def test_weights_alone_have_no_strings() -> None:
    manifests = {0: manifest(0, entry("w", (4,)), strings={"note": "kept"})}
    source = Strategy(1, 1, {"w": (Placement((1,)),)})
    assert planned(source, one_rank(), manifests).strings == {"note": "kept"}
    assert planned(source, one_rank(), manifests, unlisted=Unlisted.DROP).strings == {}


def test_a_sharded_name_that_follows_nothing_is_refused() -> None:
    source, target = two_ranks(w=ROWS, v=LINE), one_rank()
    manifests = shards({"w": (2, 6), "v": (2,)}, {"w": (2, 6), "v": (2,)})
    error = refusal(StrategyError, source, target, manifests)
    assert "'v' is sharded" in error.problem
    assert error.got == "neither listed"
    assert error.where == "dst"
    assert boxes(planned(source, target, manifests, unlisted=Unlisted.REPLICATE))["v"] == "[0:4]"


def test_state_of_another_shape_does_not_follow() -> None:
    source, target = two_ranks(**{"w": ROWS, "accum.w": LINE}), one_rank()
    manifests = shards({"w": (2, 6), "accum.w": (2,)}, {"w": (2, 6), "accum.w": (2,)})
    error = refusal(StrategyError, source, target, manifests)
    assert "'accum.w' is sharded" in error.problem
    assert error.got == "'w' listed, but of another shape"


def test_a_name_in_no_strategy_is_taken_from_the_own_rank_or_the_home() -> None:
    manifests = shards({"w": (2, 6), "seed": (3,)}, {"w": (2, 6), "seed": (3,)})
    same = planned(two_ranks(w=ROWS), two_ranks(w=ROWS), manifests, 1)
    assert {item.source_rank for tensor in same.tensors for item in tensor.reads} == {1}
    fewer = planned(two_ranks(w=ROWS), one_rank(), manifests)
    assert {tensor.spec.name: [item.source_rank for item in tensor.reads] for tensor in fewer.tensors} == {
        "w": [0, 1],
        "seed": [0],
    }


def test_a_name_that_only_other_stages_list_is_on_every_rank() -> None:
    source = Strategy(2, 2, {"w": (Placement((1,), stages=(0,)),), "v": (Placement((1,), stages=(1,)),)})
    manifests = shards({"w": (2,), "v": (2,)}, {"v": (2,)})
    target = one_rank(w=Placement((1,)), v=Placement((1,)))
    sources = {tensor.spec.name: tensor.reads[0].source_rank for tensor in planned(source, target, manifests).tensors}
    assert sources == {"w": 0, "v": 1}  # where the strategy lists it comes first
    assert {n: planned(source, target, {0: manifests[0]}).tensors[n].reads[0].source_rank for n in (0, 1)} == {
        0: 0,
        1: 0,
    }


# Absent, or a hole


def test_what_no_shard_holds_was_never_saved() -> None:
    source = two_ranks(w=ROWS, accum=ROWS)
    target = one_rank(w=Placement((1,)), accum=Placement((1,)))
    manifests = shards({"w": (2, 6)}, {"w": (2, 6)})
    assert planned(source, target, manifests).absent == ("accum",)
    error = refusal(CoverageError, source, target, manifests, strict=True)
    assert error.got == "1 absent: accum"


def test_what_another_stage_lists_is_not_absent_here() -> None:
    source = one_rank()
    target = Strategy(2, 2, {"w": (Placement((1,), stages=(0,)),), "v": (Placement((1,), stages=(1,)),)})
    assert planned(source, target, shards({"w": (4,)}), 0).absent == ()
    with pytest.raises(StrategyError, match="no parameter that the target strategy lists"):
        planned(source, target, shards({"w": (4,)}), 1)


def test_a_checkpoint_of_another_network_is_refused() -> None:
    error = refusal(StrategyError, two_ranks(w=ROWS), one_rank(), shards({"v": (4,)}, {"v": (4,)}))
    assert error.problem == "no parameter that the target strategy lists is in the checkpoint"
    assert (error.expected, error.got, error.where) == ("w", "v", "dst")


def test_a_hole_in_some_of_the_holders_is_no_hole() -> None:
    source = Strategy(4, 1, {"w": (Placement((2, 2), ((1,), ())),), "v": (Placement((4,)),)})
    target = one_rank(w=Placement((1,)), v=Placement((1,)))
    both, one = {"w": (2, 6), "v": (3,)}, {"v": (3,)}
    plan = planned(source, target, shards(one, both, both, one))
    assert [item.source_rank for item in plan.tensors[-1].reads] == [2, 1]


def test_a_stage_without_shards_is_a_hole() -> None:
    source = Strategy(4, 2, {"w": (LINE.changed(stages=(0,)),), "v": (LINE.changed(stages=(1,)),)})
    target = one_rank(w=Placement((1,)), v=Placement((1,)))
    error = refusal(CoverageError, source, target, shards({"w": (2,)}, {"w": (2,)}))
    assert error.problem == "no shard that should hold 'v' is there"
    assert error.expected == "a shard of stage 1 of the source"
    assert error.got == "shards of one of ranks 0, 1"


def test_a_tied_parameter_is_taken_from_the_stage_that_is_there() -> None:
    source = Strategy(4, 2, {"w": (ROWS.changed(stages=(0,)), COLUMNS.changed(stages=(1,)))})
    manifests = shards({"w": (2, 6)}, {"w": (2, 6)}, {"w": (4, 3)}, {"w": (4, 3)})
    for opened, ranks in (((0, 1), [0, 1]), ((2, 3), [2, 3]), ((0, 2, 3), [2, 3]), ((0, 1, 2), [0, 1])):
        plan = planned(source, one_rank(), {rank: manifests[rank] for rank in opened})
        assert [item.source_rank for item in plan.tensors[0].reads] == ranks


def test_what_the_opened_shards_lack_is_told_with_the_ranks_that_should_hold_it() -> None:
    source = Strategy(4, 1, {name: (Placement((2, 2), ((1,), ())),) for name in ("w", "v", "accum", "other")})
    target = two_ranks(w=ROWS, v=ROWS, accum=ROWS)
    manifests = shards({"w": (2, 6), "v": (2, 6)}, {}, {"v": (2, 6)}, {})
    # `other`, which the target does not say how to place, is looked for too: it is refused if any shard holds it.
    assert tensors_of(source, target, {0: manifests[0]}).lacking() == {(0, 2): ["accum", "other"]}
    assert tensors_of(source, target, {2: manifests[2]}).lacking() == {(0, 2): ["w", "accum", "other"]}
    both = one_rank(w=Placement((1,)), v=Placement((1,)))
    assert tensors_of(source, both, {0: manifests[0]}).lacking() == {(1, 3): ["w", "v"], (0, 2): ["accum", "other"]}


# What does not fit


@pytest.mark.parametrize("state", ["adam_m.v", "moments.v", "exp_avg.v"])
def test_what_is_said_of_a_tensor_that_no_rule_places_names_it_and_not_its_moment(state: str) -> None:
    """Moments come first in some files, and are cut as their parameter is."""
    parts = {"w": (2, 6), state: (2, 6), "v": (2, 6)}, {"w": (2, 6), state: (3, 6), "v": (3, 6)}
    error = refusal(DisagreementError, two_ranks(w=ROWS), one_rank(), shards(*parts))
    assert error.problem == "the source strategy does not say how 'v' is cut, and it is not the same on all ranks"
    assert error.got == f"shape [3, 6] on rank 1 of {state!r}, which goes with it"
    alone = {"w": (2, 6), state: (2, 6), "v": (2, 6)}, {"w": (2, 6), state: (3, 6), "v": (2, 6)}
    error = refusal(DisagreementError, two_ranks(w=ROWS), one_rank(), shards(*alone))
    assert error.problem.startswith(f"the source strategy does not say how {state!r} is cut")
    placed = two_ranks(w=ROWS, v=Placement((2,), ((), ())))
    error = refusal(DisagreementError, placed, one_rank(), shards(*parts))
    assert error.problem == "the shape of 'v' does not fit its layout, or the shards disagree"


def test_a_shape_that_the_layout_does_not_give_is_refused() -> None:
    error = refusal(DisagreementError, two_ranks(w=ROWS), one_rank(), shards({"w": (2, 6)}, {"w": (3, 6)}))
    assert error.problem == "the shape of 'w' does not fit its layout, or the shards disagree"
    assert error.expected == "box [2:4, 0:6] of shape [2, 6] on rank 1 (whole tensor [4, 6], as rank_0 has [2, 6])"
    assert error.got == "shape [3, 6]"
    assert error.where == "rank_1"


@pytest.mark.parametrize(("row", "rows"), [(0, 4), (2, 9)], ids=["box", "whole shape"])
def test_what_the_shard_itself_contradicts_is_refused(row: int, rows: int) -> None:
    manifests = shards({"w": (2, 6)}, {"w": (2, 6)})
    own = manifests[1].tensors["w"]._replace(box=Box((row, 0), (row + 2, 6)), global_shape=(rows, 6))
    error = refusal(DisagreementError, two_ranks(w=ROWS), one_rank(), {0: manifests[0], 1: manifest(1, own)})
    assert error.got == f"shape [2, 6] at box [{row}:{row + 2}, 0:6] of [{rows}, 6]"


def test_another_type_is_refused() -> None:
    manifests = {0: manifest(0, entry("w", (2, 6))), 1: manifest(1, entry("w", (2, 6), "bfloat16"))}
    error = refusal(DisagreementError, two_ranks(w=ROWS), one_rank(), manifests)
    assert error.problem == "source shards disagree in the type of 'w'"
    assert (error.expected, error.got, error.where) == ("float32, as in rank_0", "bfloat16", "rank_1")


def test_tensors_held_alike_are_each_checked() -> None:
    """What is computed once for many tensors must not hide that one of them differs."""
    names = {f"w{number}": (2, 6) for number in range(5)}
    source = two_ranks(**dict.fromkeys(names, ROWS))
    target = one_rank(**dict.fromkeys(names, Placement((1,))))
    assert set(boxes(planned(source, target, shards(names, names))).values()) == {"[0:4, 0:6]"}
    spoiled = shards(names, {**names, "w3": (1, 6)})
    assert "'w3'" in refusal(DisagreementError, source, target, spoiled).problem
    sound = [entry(name, shape) for name, shape in names.items()]
    spoiled = {0: manifest(0, *sound), 1: manifest(1, *sound[:2], entry("w2", (2, 6), "int8"), *sound[3:])}
    assert "'w2'" in refusal(DisagreementError, source, target, spoiled).problem
    spoiled[1] = manifest(1, *sound[:2], *sound[3:])
    assert "'w2'" in refusal(CoverageError, source, target, spoiled).problem


def test_a_tensor_that_the_source_layout_does_not_fit_is_refused() -> None:
    error = refusal(LayoutError, two_ranks(w=LINE), one_rank(), shards({"w": (2, 6)}, {"w": (2, 6)}))
    assert error.where == "tensor 'w' in rank_0"


def test_a_tensor_that_the_target_cannot_cut_is_refused() -> None:
    target = Strategy(4, 1, {"w": (Placement((4,), ((), (0,))),)}, origin="dst")
    error = refusal(LayoutError, two_ranks(w=ROWS), target, shards({"w": (2, 6)}, {"w": (2, 6)}))
    assert error.problem == "dimension 1 cannot be cut evenly"
    assert error.where == "tensor 'w', target strategy dst"


# What must agree


def compared(plan: RankPlan) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the checks of a plan: name -> the ranks compared, and whether a difference refuses the target."""
    return {check.name: (tuple(item.source_rank for item in check.reads), check.refuse) for check in plan.checks}


COUNTED: Mapping[str, tuple[int, ...]] = {"w": (2, 6), "global_step": (), "step_num": (1,), "seed": (3,)}


def test_step_counters_must_agree_and_other_unlisted_values_are_compared() -> None:
    plan = planned(two_ranks(w=ROWS), one_rank(), shards(COUNTED, COUNTED))
    assert compared(plan) == {"global_step": ((0, 1), True), "step_num": ((0, 1), True), "seed": ((0, 1), False)}


def test_each_rank_keeps_its_own_values_where_their_number_stays() -> None:
    plan = planned(two_ranks(w=ROWS), two_ranks(w=ROWS), shards(COUNTED, COUNTED))
    assert compared(plan) == {"global_step": ((0, 1), True), "step_num": ((0, 1), True)}


@pytest.mark.parametrize(
    "name", ["step", "optimizer.state.step", "state/w/step", "iteration", "args.iteration", "epoch"]
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one element"])
def test_counters_of_other_frameworks_must_agree(name: str, shape: tuple[int, ...]) -> None:
    held: Mapping[str, tuple[int, ...]] = {"w": (2, 6), name: shape}
    for target in (one_rank(), two_ranks(w=ROWS)):
        assert compared(planned(two_ranks(w=ROWS), target, shards(held, held))) == {name: ((0, 1), True)}
    listed = {"w": ROWS, name: Placement((2,), ())}
    assert compared(planned(two_ranks(**listed), one_rank(), shards(held, held))) == {name: ((0, 1), True)}


def test_what_is_only_called_like_a_counter_is_none() -> None:
    held: Mapping[str, tuple[int, ...]] = {"w": (2, 6), "step": (3,), "footstep": (), "step.scale": ()}
    plan = planned(two_ranks(w=ROWS), one_rank(), shards(held, held))
    assert compared(plan) == dict.fromkeys(("step", "footstep", "step.scale"), ((0, 1), False))


def test_of_many_counters_some_are_compared() -> None:
    names = [f"state.layers.{layer}.step" for layer in range(100)]
    held: Mapping[str, tuple[int, ...]] = {"w": (2, 6), **dict.fromkeys(names, ()), "iteration": ()}
    checks = compared(planned(two_ranks(w=ROWS), two_ranks(w=ROWS), shards(held, held)))
    assert len(checks) == 16 and "iteration" in checks and all(refuse for _, refuse in checks.values())


def test_step_counters_are_compared_even_if_they_are_dropped() -> None:
    plan = planned(two_ranks(w=ROWS), one_rank(), shards(COUNTED, COUNTED), unlisted=Unlisted.DROP)
    assert boxes(plan) == {"w": "[0:4, 0:6]"}
    assert compared(plan) == {"global_step": ((0, 1), True), "step_num": ((0, 1), True)}


def test_listed_values_are_not_compared_and_large_ones_only_at_their_beginning() -> None:
    manifests: Mapping[str, tuple[int, ...]] = {"w": (2, 6), "b": (3,), "large": (1 << 10, 1 << 10), "empty": (0, 3)}
    plan = planned(two_ranks(w=ROWS, b=WHOLE), one_rank(), shards(manifests, manifests))
    assert compared(plan) == {"large": ((0, 1), False), "empty": ((0, 1), False)}
    assert {item.region for item in plan.checks[0].reads} == {Box((0, 0), (16, 1 << 10))}


def test_a_tensor_that_says_it_is_whole_does_not_follow_what_is_held_alike() -> None:
    whole = entry("stat.w", (2, 6))._replace(box=Box((0, 0), (2, 6)), global_shape=(2, 6))
    halves = (entry("w", (2, 6))._replace(box=Box((low, 0), (low + 2, 6)), global_shape=(4, 6)) for low in (0, 2))
    manifests = {rank: manifest(rank, half, whole) for rank, half in enumerate(halves)}
    assert boxes(planned(two_ranks(w=ROWS), one_rank(), manifests)) == {"w": "[0:4, 0:6]", "stat.w": "[0:2, 0:6]"}


def test_the_rank_list_knows_rules_of_fewer_dimensions_than_the_other_side_names() -> None:
    rows = Placement((2,), ((0,),), stages=(0,), open_ended=True)
    other = Placement((2,), ((0,),), stages=(1,), open_ended=True)
    source = Strategy(4, 2, {}, (("w", rows), ("b", other)))
    columns = Placement((2,), ((), (0,)), open_ended=True)
    target = Strategy(2, 1, {}, (("w", columns), ("b", Placement((2,), ((0,),), open_ended=True))))
    for rank in range(2):
        ranks = needed_ranks(source, target, rank, names=["w", "b"], available=range(4), unlisted=Unlisted.FOLLOW)
        assert ranks == (0, 1, 2 + rank)


def test_strings_of_the_home_rank_are_taken_and_differences_told() -> None:
    manifests = {
        rank: manifest(rank, entry("w", (2, 6)), strings={"seed": str(rank), "name": "net", **more})
        for rank, more in enumerate(({}, {"only": "here"}))
    }
    plan = planned(two_ranks(w=ROWS), two_ranks(w=ROWS), manifests, 1)
    assert plan.strings == {"name": "net", "only": "here", "seed": "1"}
    assert plan.notes == ("the string 'seed' of rank_0 differs from the one taken",)


# Copies that must be the same


def alike(plan: RankPlan) -> set[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """Return what a plan wants compared: names, region, and the ranks that hold it."""
    return {
        (group.names, str(group.region), tuple(r for part in group.parts for r in part.placement.holders(part.piece)))
        for group in plan.to_compare
    }


@pytest.mark.parametrize("name", ["accu_grads.w", "grad_sum.w"])
@pytest.mark.parametrize("listed", [False, True], ids=["follows", "listed"])
def test_all_copies_of_partial_sums_are_compared(name: str, listed: bool) -> None:
    rows = Placement((2, 2), ((1,), ()))
    source = Strategy(4, 1, {"w": (rows,), **({name: (rows,)} if listed else {})})
    manifests = shards(*[{"w": (2, 6), name: (2, 6)}] * 4)
    plan = planned(source, two_ranks(w=ROWS), {0: manifests[0]})
    assert alike(plan) == {((name,), "[0:2, 0:6]", (0, 2))}
    assert "partial sums" in plan.to_compare[0].why
    assert plan.source_ranks == plan.read_ranks == (0,)


def test_copies_of_a_tied_parameter_are_compared_over_its_stages() -> None:
    source = Strategy(4, 2, {"w": (ROWS.changed(stages=(0, 1)),), "v": (ROWS.changed(stages=(0,)),)})
    manifests = shards(*[{"w": (2, 6), "v": (2, 6)}] * 2, *[{"w": (2, 6)}] * 2)
    plan = planned(source, two_ranks(w=ROWS, v=ROWS), {1: manifests[1]}, 1)
    assert alike(plan) == {(("w",), "[2:4, 0:6]", (1, 3))}
    assert "drifted apart" in plan.to_compare[0].why


def test_copies_of_a_tied_parameter_that_stages_cut_differently_are_compared_where_they_meet() -> None:
    source = Strategy(4, 2, {"w": (ROWS.changed(stages=(0,)), COLUMNS.changed(stages=(1,)))})
    manifests = shards(*[{"w": (2, 6)}] * 2, *[{"w": (4, 3)}] * 2)
    plan = planned(source, two_ranks(w=ROWS), {0: manifests[0]})
    assert alike(plan) == {(("w",), "[0:2, 0:3]", (0, 2)), (("w",), "[0:2, 3:6]", (0, 3))}
    assert all(part.box.contains(group.region) for group in plan.to_compare for part in group.parts)


def test_other_copies_are_compared_if_that_is_asked() -> None:
    manifests = shards(*[{"w": (3, 6), "v": (3, 6), "x": (2, 6), "seed": (4,)}] * 2)
    source = two_ranks(w=WHOLE, v=WHOLE, x=ROWS)
    target = one_rank(**dict.fromkeys("wvx", Placement((1,))))
    assert alike(planned(source, target, manifests)) == set()
    plan = planned(source, target, manifests, replicas=Replicas.CHECK)
    assert alike(plan) == {(("w", "v"), "[0:3, 0:6]", (0, 1))}  # of x each has one part, of seed nobody says


def counted(group: ReplicaGroup) -> list[str]:
    """Return names, once for each copy of each element that is read to compare them."""
    return [name for name in group.names for _ in range(group.replicas * group.region.size)]


@given(cases(unlisted=False), st.integers(1, 9))
def test_what_targets_need_is_compared_once_by_one_process(case: Case, processes: int) -> None:
    source, target = strategy_of(case.src), strategy_of(case.dst)
    every = manifests_of(case.src, case.tensors)
    plans = [planned(source, target, every, rank, replicas=Replicas.CHECK) for rank in range(target.world_size)]
    wanted = tuple(dict.fromkeys(group for plan in plans for group in plan.to_compare))
    shares = [list(partition_for(wanted, process, processes)) for process in range(processes)]
    units = [(name, group.holding, group.region) for share in shares for group in share for name in group.names]
    assert len(units) == len(set(units))
    assert set(units) == {(name, group.holding, group.region) for group in wanted for name in group.names}
    whole = sum(len(counted(group)) for group in wanted)
    largest = max((len(counted(group._replace(names=("w",)))) for group in wanted), default=0)
    assert all(sum(len(counted(group)) for group in share) <= whole / processes + largest for share in shares)
    for share in shares:  # those of the same holders one after another: their shards are opened once
        holdings = [group.holding for group in share]
        assert len([1 for number, group in enumerate(holdings) if group not in holdings[:number]]) == len(
            [1 for number, group in enumerate(holdings) if number == 0 or group != holdings[number - 1]]
        )


# What the target says of itself


def test_the_plan_carries_what_the_shard_is_to_say_of_itself() -> None:
    manifests: dict[str, TensorEntry] = {"b": entry("b", (2,)), "w": entry("w", (2, 6))}
    plan = planned(
        two_ranks(w=ROWS),
        two_ranks(w=COLUMNS),
        {number: manifest(number, *manifests.values()) for number in range(2)},
        1,
    )
    assert (plan.identity.rank, plan.identity.world_size, plan.identity.strategy) == (1, 2, "the table")
    assert [tensor.spec.name for tensor in plan.tensors] == ["b", "w"]  # in the order of the source
    assert tuple(plan.shard.tensors) == tuple(tensor.spec for tensor in plan.tensors)


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("layers.0.w", ROWS),
        ("moments.layers.0.w", ROWS),
        ("optimizer.exp_avg.layers.0.w", ROWS),
        ("vision.layers.0.w", WHOLE),  # of another part of the model
        ("decoder.embed.weight", WHOLE),
        ("adam_v.embed.weight", COLUMNS),
        ("embed.weight", COLUMNS),
    ],
)
@pytest.mark.parametrize("mark", [".", "/"])
def test_a_rule_for_every_name_places_namesakes_that_are_no_state(name: str, placed: Placement, mark: str) -> None:
    rules = (("layers.*", ROWS), ("embed.weight", COLUMNS), ("*", WHOLE))
    strategy = Strategy(2, 1, {}, tuple((glob.replace(".", mark), placement) for glob, placement in rules))
    assert find_or_follow(strategy, name.replace(".", mark), lambda base: True) == (placed,)
    listing = Strategy(2, 1, {"embed.weight": (COLUMNS,), "layers.0.w": (ROWS,)}, (("*", WHOLE),))
    assert find_or_follow(listing, name, lambda base: True) == (placed,)
    present = {"layers.0.w", "embed.weight"}
    is_state = name.startswith(("moments", "optimizer", "adam"))
    assert is_dropped(Strategy(2, 1, {}, (("*", WHOLE),)), name, present) is is_state


@pytest.mark.parametrize("rules", [(("1.*", ROWS),), (("1.*", ROWS), ("*", WHOLE))])
def test_the_number_of_state_is_no_module(rules: tuple[tuple[str, Placement], ...]) -> None:
    """torch's `optimizer.state.1.momentum_buffer` may be of `0.bias`."""
    strategy = Strategy(2, 1, {}, rules)
    placed = find_or_follow(strategy, "optimizer.state.1.momentum_buffer", lambda base: True)
    assert placed == ((WHOLE,) if len(rules) > 1 else ())
    assert find_or_follow(strategy, "moments.1.weight", lambda base: True) == (ROWS,)
