"""Features of a packed batch are those of each document run alone, and nothing more is run."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from target_models import CONFIGS, NUM_LAYERS, write_model
from torch import Tensor, nn

from dflash.target.model import Target
from dflash.target.packed import exact_attention

TAPS = (2, 0, 1)
BOUNDS = [0, 7, 8, 19, 24]  # the last document is the padding tail


def load(tmp_path: Path, name: str, taps: Sequence[int] | int = TAPS) -> Target:
    folder = write_model(tmp_path / name, name)
    return Target.load(folder, taps=taps, device="cpu", dtype=torch.float32)


def packed(bounds: Sequence[int] = BOUNDS, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 60, (bounds[-1],), generator=generator)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
    documents = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(pairwise(bounds))])
    tokens[bounds[-2] :] = 0
    positions[bounds[-2] :] = 0
    documents[bounds[-2] :] = -1
    return {"tokens_T": tokens, "positions_T": positions, "documents_T": documents}


def alone(target: Target, tokens: Tensor) -> Tensor:
    """Run one document through plain transformers and pick ``hidden_states[l + 1]``."""
    with torch.no_grad():
        states = target.model(tokens[None], output_hidden_states=True, use_cache=False)
    return torch.cat([states.hidden_states[tap + 1][0] for tap in target.taps], dim=-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_features_equal_each_document_run_alone(tmp_path: Path, name: str) -> None:
    target = load(tmp_path, name)
    batch = packed()
    features = target.features(**batch, cu_lengths=BOUNDS)
    assert features.shape == (24, 3 * 32)
    for start, stop in list(pairwise(BOUNDS))[:-1]:
        expected = alone(target, batch["tokens_T"][start:stop])
        torch.testing.assert_close(features[start:stop], expected, rtol=1e-4, atol=1e-5)
    assert features.isfinite().all()


@contextmanager
def one_thread() -> Iterator[None]:
    """An expert has another number of rows in another batch, and so two threads share its product
    otherwise: 1.2e-6 apart on a CPU on which one thread finds no difference at all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_a_document_does_not_move_when_its_neighbours_change(tmp_path: Path, name: str) -> None:
    target = load(tmp_path, name)
    one, two = packed(seed=0), packed(seed=1)
    two["tokens_T"][8:19] = one["tokens_T"][8:19]
    with one_thread():
        first, second = (target.features(**batch, cu_lengths=BOUNDS) for batch in (one, two))
    torch.testing.assert_close(first[8:19], second[8:19], rtol=0, atol=1e-6)
    assert not torch.allclose(first[:7], second[:7])


def test_later_layers_the_norm_and_the_head_never_run(tmp_path: Path) -> None:
    target = load(tmp_path, "qwen3")
    calls: list[str] = []

    def count(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    originals: list[tuple[str, nn.Module]] = list(target.model.named_modules())
    trunk = target._trunk  # noqa: SLF001 (what runs is the question)
    for name, module in originals:
        module.register_forward_hook(count("model." + name))
    for name, module in trunk.named_modules():
        module.register_forward_hook(count("trunk." + name))
    target.features(**packed(), cu_lengths=BOUNDS)
    layers = [name for name in calls if name.count(".") == 2 and ".layers." in name]
    assert layers == ["trunk.layers.0", "trunk.layers.1", "trunk.layers.2"]
    assert not [name for name in calls if name.startswith("model.") or "lm_head" in name]
    assert isinstance(trunk.norm, nn.Identity)
    assert len(target.model.model.layers) == NUM_LAYERS


def test_the_trunk_shares_every_weight_with_the_model(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    owned = {p.data_ptr() for p in target.model.parameters()}
    trunk = target._trunk  # noqa: SLF001
    assert all(p.data_ptr() in owned for p in trunk.parameters())
    assert target.model.config._attn_implementation == "sdpa"  # noqa: SLF001
    assert not any(p.requires_grad for p in target.model.parameters())


def test_features_are_written_into_the_given_buffer_in_tap_order(tmp_path: Path) -> None:
    batch = packed()
    ordered = load(tmp_path, "llama", taps=(0, 1, 2)).features(**batch, cu_lengths=BOUNDS)
    target = load(tmp_path, "llama", taps=(2, 0, 1))
    out = torch.full((24, 96), float("nan"), dtype=torch.bfloat16)
    result = target.features(**batch, cu_lengths=BOUNDS, out=out)
    assert result is out
    expected = torch.cat([ordered[:, 64:], ordered[:, :64]], dim=-1)
    torch.testing.assert_close(out, expected.to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_empty_document_changes_nothing(tmp_path: Path, name: str) -> None:
    target = load(tmp_path, name)
    expected = target.features(**packed(), cu_lengths=BOUNDS)
    found = target.features(**packed(), cu_lengths=[0, 7, 7, *BOUNDS[2:], BOUNDS[-1]])
    assert torch.equal(found, expected)


def test_wrong_offsets_are_refused(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    with pytest.raises(ValueError, match="from 0 to 24"):
        target.features(**packed(), cu_lengths=[0, 7, 19])


def test_two_threads_on_one_target_do_not_mix(tmp_path: Path) -> None:
    target = load(tmp_path, "qwen3")
    bounds = ([0, 10, 24], [0, 3, 5, 24])
    batches = [packed(b, seed=i) for i, b in enumerate(bounds)]
    expected = [
        target.features(**batch, cu_lengths=b) for batch, b in zip(batches, bounds, strict=True)
    ]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            found = target.features(**batches[index], cu_lengths=bounds[index])
            if not torch.equal(found, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_exact_attention_follows_the_formula() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    allowed = torch.ones(3, 5, dtype=torch.bool).tril(1)
    sinks = torch.randn(4)
    out = exact_attention(q, k, v, allowed=allowed, scale=0.3, softcap=1.5, sinks=sinks)
    for head in range(4):
        for row in range(3):
            weights, total = [], float(sinks[head].exp())
            for column in range(5):
                score = float(q[0, head, row] @ k[0, head // 2, column]) * 0.3
                capped = 1.5 * torch.tanh(torch.tensor(score / 1.5))
                weights.append(float(capped.exp()) if allowed[row, column] else 0.0)
                total += weights[-1]
            expected = sum(w / total * v[0, head // 2, i] for i, w in enumerate(weights))
            torch.testing.assert_close(out[0, head, row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_features_on_a_gpu_equal_those_in_fp32(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / name, name)
    exact = Target.load(folder, taps=TAPS, device="cpu", dtype=torch.float32)
    half = Target.load(folder, taps=TAPS, device="cuda", dtype=torch.bfloat16)
    batch = packed()
    on_gpu = {key: value.cuda() for key, value in batch.items()}
    expected = exact.features(**batch, cu_lengths=BOUNDS)[:19]
    found = half.features(**on_gpu, cu_lengths=BOUNDS).float().cpu()
    assert found.isfinite().all()
    # bf16 keeps 8 bits; a leak or a wrong window moves features by their own size
    share = (found[:19] - expected).norm() / expected.norm()
    assert share < (0.25 if name == "qwen3_moe" else 0.05)  # a rounded router picks other experts
