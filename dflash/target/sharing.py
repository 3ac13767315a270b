"""Copies of a model that share its weights but attend in another way.

transformers finds a module's attention by a name in its config. A copy with a config of its own
therefore attends differently while the original goes on undisturbed, in any thread.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def sharing_copy(module: nn.Module, *, attention: str) -> Any:  # noqa: ANN401 (a transformers model)
    """Copy the modules and configs, share every parameter and buffer.

    Args:
        module: a transformers model.
        attention: a name registered with transformers' ``AttentionInterface`` and with no mask
            function, so that no attention mask is ever built.
    """
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    twin = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    for part in twin.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention  # noqa: SLF001 (there is no public setter)
    return twin


def decoder_layers(base: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the attribute that holds the list of decoder layers, and the list."""
    count = getattr(getattr(base, "config", None), "num_hidden_layers", None)
    for name, child in base.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return name, child
    return None


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make an attention function known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
