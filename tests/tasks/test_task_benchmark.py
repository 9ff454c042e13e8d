"""`bertsmith bench finetune`: real steps on texts of mixed lengths, and figures that follow from each other."""

import pytest

from bertsmith.errors import UserError
from bertsmith.tasks.benchmark import benchmark_finetuning, synthetic_examples
from command_line import bertsmith


def test_lengths_are_mixed_and_fixed_by_the_seed() -> None:
    lengths = [len(sequence) for (sequence,) in synthetic_examples(200, 64, 3)]
    assert lengths == [len(sequence) for (sequence,) in synthetic_examples(200, 64, 3)]
    assert min(lengths) >= 16
    assert max(lengths) <= 64
    assert len(set(lengths)) > 20


def test_figures_of_the_command() -> None:
    flags = ("--model", "tiny", "--batch", 4, "--length", 16, "--steps", 2, "--precision", "fp32", "--json")
    found = bertsmith("bench", "finetune", *flags).json
    assert found["examples_per_second"] == pytest.approx(4 / found["seconds_per_step"])
    tokens = sum(len(sequence) for (sequence,) in synthetic_examples(4, 16, 0))
    assert found["tokens_per_second"] == pytest.approx(tokens / found["seconds_per_step"])
    assert found["utilization"] == pytest.approx(found["gflops"] / found["matmul_gflops"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": "huge"}, "'huge'"),
        ({"batch": 0}, "--batch 0"),
        ({"length": 3}, "--length 3"),
        ({"steps": 0}, "--steps 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_wrong_options(options: dict[str, object], named: str) -> None:
    whole = {"size": "tiny", "batch": 2, "length": 16, "steps": 1, "device": "cpu", "precision": "fp32"} | options
    with pytest.raises(UserError, match=named):
        benchmark_finetuning(**whole)  # type: ignore[arg-type]
