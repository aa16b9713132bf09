"""What users are told of elements that are too large for the type of their target."""

from __future__ import annotations

from reshard_mpi.runs.outcome import Outcome, Overflow, TargetReport, joined_overflows, overflow_warnings


def target(rank: int, *overflows: Overflow) -> TargetReport:
    return TargetReport(rank, f"rank_{rank}", (), 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 1, overflows=overflows)


def test_processes_that_fill_a_target_together() -> None:
    parts = [Overflow("x", "float16", 3), Overflow("y", "bfloat16", 1), Overflow("x", "float16", 9)]
    assert joined_overflows(parts) == (Overflow("x", "float16", 12), Overflow("y", "bfloat16", 1))


def test_one_line_for_a_tensor() -> None:
    outcome = Outcome((target(0, Overflow("x", "float16", 12)), target(1)))
    assert outcome.warnings == ("12 elements of 'x' are too large for float16 and became infinite",)


def test_words_for_one_element_for_several_targets_and_for_a_type_without_infinity() -> None:
    shards = [[Overflow("x", "float8_e4m3fn", 1)], [Overflow("y", "float16", 2)], [Overflow("y", "float16", 3)]]
    assert list(overflow_warnings(shards)) == [
        "1 element of 'x' is too large for float8_e4m3fn and became 448, its largest number",
        "5 elements of 'y', in 2 targets together, are too large for float16 and became infinite",
    ]


def test_many_tensors_are_told_in_few_lines() -> None:
    lines = list(overflow_warnings([[Overflow(f"w{number}", "float16", 2) for number in range(50)]]))
    assert len(lines) == 9
    assert lines[-1] == "so did 84 elements of 42 further tensors; the report (--report) names all"


def test_report_has_all_of_them() -> None:
    (facts,) = Outcome((target(0, Overflow("x", "float16", 12)),)).as_json()["targets"]
    assert facts["overflows"] == [{"tensor": "x", "dtype": "float16", "elements": 12}]
