"""Whether what a program is fed is what it was made ready for."""

from collections.abc import Mapping

from torch import Tensor

from dflash.execution.faults import SealedError

HINT = "pad it to the one static shape of the run, or make the program ready for this one"


def check_signature(fed: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Hold *fed* against the buffers it will be copied to.

    Raises:
        SealedError: a name, shape, dtype or stride that is not the buffer's, all of it in one
            sentence.
    """
    if fed.keys() != inputs.keys():
        strange = sorted(fed.keys() ^ inputs.keys())
        raise SealedError(
            f"fed {', '.join(sorted(fed))} to a program with inputs {', '.join(sorted(inputs))};"
            f" the difference is {', '.join(strange)}"
        )
    for name, buffer in inputs.items():
        tensor = fed[name]
        for fact, found, expected in (
            ("shape", tuple(tensor.shape), tuple(buffer.shape)),
            ("dtype", tensor.dtype, buffer.dtype),
            ("strides", tensor.stride(), buffer.stride()),
        ):
            if found != expected:
                raise SealedError(
                    f"input {name} has {fact} {found}, but the program was made ready for"
                    f" {fact} {expected}",
                    hint=HINT,
                )
