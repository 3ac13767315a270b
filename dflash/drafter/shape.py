"""What defines a drafter's tensors. How a shape is written to disk is in ``zlab``."""

from dataclasses import dataclass

from dflash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """Every number that decides a drafter's parameters or its arithmetic.

    ``target_layer_ids`` are 0-based decoder layers of the target whose *output* is tapped, in the
    order in which they are concatenated. ``block_size`` counts the anchor.

    Raises:
        ConfigError: the numbers contradict each other; every contradiction is listed.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 40960

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError("the drafter's shape is impossible: " + "; ".join(problems))

    @property
    def num_taps(self) -> int:
        """K, the number of target layers that are fused."""
        return len(self.target_layer_ids)

    @property
    def num_parameters(self) -> int:
        """Trainable scalars; the embedding and the head belong to the target."""
        width, q_width = self.hidden_size, self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        attention = 2 * width * q_width + 2 * width * kv_width + 2 * self.head_dim
        if self.attention_bias:
            attention += q_width + 2 * kv_width + width
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        return self.num_layers * layer + self.num_taps * width**2 + 2 * width

    def _problems(self) -> list[str]:
        sizes = ["hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"]
        sizes += ["head_dim", "num_target_layers", "vocab_size", "max_position_embeddings"]
        problems = [
            f"{name} must be at least 1, got {getattr(self, name)}"
            for name in sizes
            if getattr(self, name) < 1
        ]
        if self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_heads = {self.num_heads} must be a multiple of num_kv_heads ="
                f" {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.block_size < 2:  # noqa: PLR2004  a block is the anchor and at least one mask
            problems.append(f"block_size must be at least 2, got {self.block_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(
                f"mask_token_id = {self.mask_token_id} must lie in [0, {self.vocab_size})"
            )
        # The last layer is refused: its output means different tensors in different readers.
        last = self.num_target_layers - 1
        if not self.target_layer_ids:
            problems.append("target_layer_ids must name at least one layer")
        if len(set(self.target_layer_ids)) != self.num_taps:
            problems.append(f"target_layer_ids repeats a layer: {list(self.target_layer_ids)}")
        if any(not 0 <= layer < last for layer in self.target_layer_ids):
            problems.append(
                f"target_layer_ids must lie in [0, {last}), got {list(self.target_layer_ids)}"
            )
        return problems
