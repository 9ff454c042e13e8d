"""The compiled encoder: the numbers of the plain one, one piece of code for all batches, dropout by the step's key.

With the backend that runs what was traced (forward, backward and what is kept between them) without generating code;
`slow`: the real one, with a C++ compiler.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_batches import make_packed
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bertsmith.errors import UserError
from bertsmith.model import compiled
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.compiled import compile_encoder, compiler_problem, hashed_masks
from bertsmith.model.config import BertConfig
from bertsmith.model.varlen import VarlenPlan, cover_rows

SMALL = BertConfig(vocab_size=301, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
CPU = torch.device("cpu")
ROWS, SEQUENCES, MASKED, LONGEST = 64, 6, 16, 16
LENGTHS = [[16, 16, 10, 3], [16, 9, 16, 16, 5], [5, 2], [16] * 4]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(backend: Any = None) -> BertForPreTraining:
    model = BertForPreTraining(SMALL).initialize(3)
    if backend is not None:
        compile_encoder(model.bert, backend)
    return model


def step(
    model: BertForPreTraining, lengths: list[int], key: int | None = None, static: bool = True
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a batch filled up to the one shape. `key`: of dropout."""
    batch = make_packed(lengths)
    pieces = cover_rows(batch.sequence_starts.numpy(), ROWS, LONGEST)
    pieces = np.pad(pieces, (0, SEQUENCES + 5 - len(pieces)), mode="edge")

    def filled(ids: Tensor, length: int) -> Tensor:
        return F.pad(ids, (0, length - len(ids)))

    model.zero_grad()
    loss = model(
        filled(batch.token_ids, ROWS),
        filled(batch.segment_ids, ROWS),
        filled(batch.position_ids, ROWS),
        filled(batch.sequence_starts[:-1], SEQUENCES + 1),
        filled(batch.masked_positions, MASKED),
        batch.masked_labels,
        batch.next_sentence_labels,
        0.1,
        0.3,
        None if key is None else hashed_masks(SMALL, (1, key), CPU),
        VarlenPlan(torch.from_numpy(pieces), LONGEST, static),
    )
    loss.total.backward()
    return loss.total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("key", [None, 4], ids=["plain", "dropout"])
def test_losses_and_gradients_and_no_second_compilation(key: int | None) -> None:
    fast, slow = build("aot_eager"), build()
    for number, lengths in enumerate(LENGTHS):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = step(fast, lengths, key)
        assert_equal(found, step(slow, lengths, key))
        if key is None:  # the model as a CPU trains it, without anything filled up
            batch = make_packed(lengths)
            slow.zero_grad()
            loss = slow(*batch.arguments(), *batch.targets(), 0.1, 0.3)
            loss.total.backward()
            assert_equal(found, (loss.total.item(), {name: p.grad for name, p in slow.named_parameters()}))


def test_dropout_is_a_function_of_the_key() -> None:
    model = build("aot_eager")
    (one, first), (two, second), (other, _) = (step(model, LENGTHS[0], key) for key in (4, 4, 5))
    assert one == two != other
    assert all(torch.equal(first[name], gradient) for name, gradient in second.items())


def test_a_batch_of_another_shape_goes_through_the_same_layers_under_the_same_masks() -> None:
    model = build("aot_eager")
    expected = step(model, LENGTHS[0], 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_equal(step(model, LENGTHS[0], 4, static=False), expected)


def test_evaluation_compiles_nothing() -> None:
    model, batch = build("aot_eager"), make_packed(LENGTHS[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        counts = model.evaluate(*batch.arguments(), *batch.targets())
    assert counts == build().evaluate(*batch.arguments(), *batch.targets())


def test_activations_computed_again_are_dropped_alike() -> None:
    """As fsdp does it: a layer's forward pass a second time, in the backward pass, with the masks' number set back."""
    model = build("aot_eager")
    expected = step(model, LENGTHS[0], 4)
    passes = 0
    for layer in model.bert.encoder.layer:
        inner = layer.forward

        def again(hidden: Tensor, plan: Any, masks: Any, rows: Any = None, inner: Any = inner) -> Tensor:
            first = masks.drawn

            def run(hidden: Tensor) -> Tensor:
                nonlocal passes
                passes += 1
                masks.drawn = first
                return inner(hidden, plan, masks, rows)

            return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)

        layer.forward = again
    assert_equal(step(model, LENGTHS[0], 4), expected)
    assert passes == 2 * SMALL.num_hidden_layers


def test_parameters_keep_their_names() -> None:
    assert build("aot_eager").state_dict().keys() == build().state_dict().keys()


def test_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, code in (("good", 0), ("broken", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiled.varlen, "fits", lambda device, dtype, size: dtype is torch.bfloat16)
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)

    def problem(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> str | None:
        return compiler_problem(torch.device(device), dtype, SMALL)

    assert "no compiler is found (g++" in str(problem())
    (tmp_path / "broken").rename(tmp_path / "clang++")  # which Inductor does not look for
    assert "no compiler is found (g++" in str(problem())
    (tmp_path / "clang++").rename(tmp_path / "g++")
    assert problem() == "the compiler g++ does not run"
    monkeypatch.setenv("CXX", str(tmp_path / "good"))
    assert problem() is None
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))  # what stands beside it is not tried
    assert f"the compiler {tmp_path / 'gone'} does not run" == problem()
    assert "for float32 and heads of 16" in str(problem("cuda", torch.float32))
    assert "triton" in str(problem("cuda"))
    monkeypatch.setattr(compiled, "find_spec", lambda name: name)
    assert "no compiler is found (gcc nor clang" in str(problem("cuda"))
    (tmp_path / "good").rename(tmp_path / "clang")
    assert problem("cuda") is None


def test_code_that_cannot_be_made_is_the_machines_fault() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise OSError("Python.h: no such file")

    with pytest.raises(UserError, match=r"could not compile .* \(Python.h: no such file\); use --compile off"):
        step(build(broken), LENGTHS[0], 4)


@pytest.mark.slow
@pytest.mark.skipif(compiler_problem(CPU, torch.float32, SMALL) is not None, reason="needs a C++ compiler")
def test_generated_code() -> None:
    fast, slow = build("inductor"), build()
    for number, lengths in enumerate(LENGTHS[:2]):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = step(fast, lengths, 4)
        assert_equal(found, step(slow, lengths, 4))
