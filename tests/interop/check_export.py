"""Checks an exported drafter with transformers alone, in whatever version is installed.

    python check_export.py [FOLDER] [--reference FILE]

Without FOLDER the golden drafter is exported first (that needs dflash). ``--reference`` names a
copy of z-lab's ``dflash/model.py``; its class must then load the folder and agree too. Everything
below is written from the format's description, and shares no code with dflash.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

GOLDEN = Path(__file__).parents[1] / "golden"
BF16_TOLERANCE = 0.05  # of outputs near 1: sums in another order differ by a few bf16 steps


def problems_of(folder: Path, reference: Path | None = None) -> list[str]:
    """Everything that is wrong with the exported *folder*, in sentences."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    found = [*_config_problems(folder, raw), *_weight_problems(weights, raw)]
    if not found:
        found += _output_problems(folder, weights, reference)
    return found


def _config_problems(folder: Path, raw: dict[str, Any]) -> Iterator[str]:
    for kind in (Qwen3Config, AutoConfig):
        config = kind.from_pretrained(folder)
        name = f"{kind.__name__} of transformers {transformers.__version__}"
        if type(config) is not Qwen3Config:
            yield f"{name} reads a {type(config).__name__}, not a Qwen3Config"
        plain = {
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "layer_types"),
            *("attention_bias", "max_position_embeddings", "hidden_act", "tie_word_embeddings"),
            *("block_size", "num_target_layers", "dflash_config", "is_causal", "sliding_window"),
        }
        for field in sorted(plain):
            if getattr(config, field) != raw[field]:
                yield f"{name} reads {field} as {getattr(config, field)}, not {raw[field]}"
        if raw["dflash_config"]["block_size"] != raw["block_size"]:
            yield "block_size differs between the top level and dflash_config"
        got = Qwen3RotaryEmbedding(config).inv_freq
        width, theta = raw["head_dim"], raw["rope_theta"]
        wanted = torch.tensor([theta ** (-2 * j / width) for j in range(width // 2)])
        if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=1e-5, atol=0):
            yield f"{name} rotates with frequencies of another base than {theta}"


def _weight_problems(weights: dict[str, Tensor], raw: dict[str, Any]) -> Iterator[str]:
    wanted = _shapes(raw)
    for name in sorted(wanted.keys() ^ weights.keys()):
        yield f"{name} is {'missing' if name in wanted else 'not part of the format'}"
    for name in sorted(wanted.keys() & weights.keys()):
        if tuple(weights[name].shape) != wanted[name]:
            yield f"{name} has shape {tuple(weights[name].shape)}, not {wanted[name]}"
        if weights[name].dtype != torch.bfloat16:
            yield f"{name} is stored as {weights[name].dtype}, not bfloat16"


def _shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    wide, inner, head = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = raw["num_attention_heads"] * head, raw["num_key_value_heads"] * head
    layer = {
        "input_layernorm.weight": (wide,),
        "self_attn.q_proj.weight": (queries, wide),
        "self_attn.k_proj.weight": (keys, wide),
        "self_attn.v_proj.weight": (keys, wide),
        "self_attn.o_proj.weight": (wide, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "post_attention_layernorm.weight": (wide,),
        "mlp.gate_proj.weight": (inner, wide),
        "mlp.up_proj.weight": (inner, wide),
        "mlp.down_proj.weight": (wide, inner),
    }
    num_taps = len(raw["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (wide, num_taps * wide), "hidden_norm.weight": (wide,)}
    shapes |= {
        f"layers.{i}.{name}": shape
        for i in range(raw["num_hidden_layers"])
        for name, shape in layer.items()
    }
    return shapes | {"norm.weight": (wide,)}


def _output_problems(
    folder: Path, weights: dict[str, Tensor], reference: Path | None
) -> Iterator[str]:
    """Compute one block by the formulas, and with the reference class if there is one."""
    config = Qwen3Config.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    num_taps = len(config.dflash_config["target_layer_ids"])
    context, slots = 5, config.block_size
    block = torch.randn(slots, config.hidden_size, generator=generator).bfloat16()
    features = torch.randn(context, num_taps * config.hidden_size, generator=generator).bfloat16()
    ours = block_output(weights, config, block, features=features)
    if not ours.isfinite().all():
        yield "the drafter's output is not finite"
    if _is_golden(weights):
        yield from _golden_problems(weights, config)
    if reference is not None:
        model, info = _reference_class(reference).from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        for kind in ("missing_keys", "unexpected_keys"):
            if info[kind]:
                yield f"the reference class reports {kind}: {sorted(info[kind])}"
        with torch.no_grad():
            theirs = model.eval()(
                noise_embedding=block[None],
                target_hidden=features[None],
                position_ids=torch.arange(context + slots)[None],
            )
        if (theirs[0] - ours).abs().max() > BF16_TOLERANCE:
            yield "the reference class computes another block"


def _is_golden(weights: dict[str, Tensor]) -> bool:
    golden = load_file(GOLDEN / "model.safetensors")
    return golden.keys() == weights.keys() and all(
        torch.equal(golden[name].bfloat16(), weight) for name, weight in weights.items()
    )


def _golden_problems(weights: dict[str, Tensor], config: Qwen3Config) -> Iterator[str]:
    """z-lab's own class gave these hidden states for these weights, in bf16."""
    golden = load_file(GOLDEN / "golden.safetensors")
    for row, ids in enumerate(golden["infer_block_ids"]):
        context = golden["infer_pos"].shape[1] - len(ids)
        ours = block_output(
            weights,
            config,
            golden["embed_tokens"][ids].bfloat16(),
            features=golden["target_hidden"][row, :context].bfloat16(),
        )
        difference = (ours - golden["infer_hidden_bf16"][row]).abs().max().item()
        if difference > BF16_TOLERANCE:
            yield f"row {row} differs from z-lab's output by {difference:.3f}"


def _reference_class(path: Path) -> Any:  # noqa: ANN401 (a class known only at run time)
    spec = importlib.util.spec_from_file_location("zlab_dflash", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["zlab_dflash"] = module
    spec.loader.exec_module(module)
    return module.DFlashDraftModel


def block_output(
    weights: dict[str, Tensor], config: Qwen3Config, block: Tensor, *, features: Tensor
) -> Tensor:
    """The drafter's output for one block after its context: one head and one slot at a time."""
    context, slots = len(features), len(block)
    rotary = Qwen3RotaryEmbedding(config)
    cos, sin = (t[0] for t in rotary(block[None], torch.arange(context + slots)[None]))
    eps, width = config.rms_norm_eps, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    fused = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    h = block
    for i in range(config.num_hidden_layers):
        w = {n.removeprefix(f"layers.{i}."): t for n, t in weights.items()}
        x = _norm(h, w["input_layernorm.weight"], eps)
        both = torch.cat([fused, x])
        heads = []
        for number in range(config.num_attention_heads):
            rows = slice(number * width, (number + 1) * width)
            shared = slice(number // group * width, (number // group + 1) * width)
            q = _norm(x @ w["self_attn.q_proj.weight"][rows].T, w["self_attn.q_norm.weight"], eps)
            k = both @ w["self_attn.k_proj.weight"][shared].T
            k = _turn(_norm(k, w["self_attn.k_norm.weight"], eps), cos, sin)
            v = both @ w["self_attn.v_proj.weight"][shared].T
            scores = _turn(q, cos[context:], sin[context:]) @ k.T * width**-0.5
            heads.append(scores.float().softmax(-1).to(v.dtype) @ v)
        h = h + torch.cat(heads, dim=-1) @ w["self_attn.o_proj.weight"].T
        y = _norm(h, w["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T)
        h = h + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return _norm(h, weights["norm.weight"], eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[:, half:], x[:, :half]], dim=-1) * sin


def export_golden(out: Path) -> Path:
    """Export the golden drafter with dflash."""
    from dflash.train.export import export_zlab
    from dflash.train.stored import open_checkpoint

    export_zlab(open_checkpoint(GOLDEN), out)
    return out


def main() -> int:
    """Print what was checked; 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description="check an exported drafter")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--reference", type=Path, help="z-lab's dflash/model.py")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or export_golden(Path(scratch) / "exported")
        found = problems_of(folder, chosen.reference)
    lines = [f"transformers {transformers.__version__}, torch {torch.__version__}", *found]
    if not found:
        lines.append("config, frequencies, keys, dtypes and outputs agree")
    print("\n".join(lines))  # noqa: T201  (a program, not a module)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
