"""Which two benches measured the same thing, and what is told of the others."""

import pytest
from bench_pairs import bench, change, compared, timed
from bench_samples import ENVIRONMENT, measured, sample

from dflash.errors import UsageError
from dflash.measurement import Bench


def test_another_shape_under_the_same_name_is_refused() -> None:
    one = bench(timed("eager", 100))
    shapes = {"made-up-3072": {"token_budget": 4096, "num_anchors": 512, "num_documents": 1}}
    other = one.model_copy(update={"shapes": shapes})
    with pytest.raises(UsageError, match="token_budget is 3072 before and 4096 after"):
        compared(one, other)


def test_another_way_to_measure_is_refused() -> None:
    one = bench(timed("eager", 100), options={"matmul": "bf16"})
    other = one.model_copy(update={"options": {"matmul": "fp8"}})
    with pytest.raises(UsageError, match="matmul is bf16 before and fp8 after"):
        compared(one, other)


def on(*devices: str, target: str = "auto") -> Bench:
    options = {"devices": list(devices), "target_device": target}
    return bench(timed("eager", 100)).model_copy(update={"options": options})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (on("cuda:0", "cuda:0"), on("cuda:1", "cuda:1")),
        (on("cuda:1", "cuda:0"), on("cuda:0", "cuda:1")),
        (on("cuda:0"), on("cuda:0", target="cuda:0")),
        (on("cuda:1"), on("cuda:0", target="cuda:0")),
        (on("cuda:0", target="cuda:1"), on("cuda:1", target="cuda:0")),
        (on("cuda:0", target="cuda:1"), on("cuda:0", target="cuda:2")),
        (on("cpu"), on("cuda:0")),
    ],
)
def test_devices_that_are_shared_alike_are_the_same_whatever_they_are_called(
    before: Bench, after: Bench
) -> None:
    found = compared(before, after, "step_ms > +3%")
    assert change(found).regression is False
    assert not any("target_device" in text for text in found.differences)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (on("cuda:0", "cuda:0"), on("cuda:0", "cuda:1")),
        (on("cuda:0", target="cuda:1"), on("cuda:1", target="cuda:1")),
        (on("cuda:0", target="cuda:1"), on("cuda:0")),
        (on("cuda:0", target="cuda:1"), on("cuda:0", target="cpu")),
        (on("cuda:0", "cuda:1", target="cuda:0"), on("cuda:0", "cuda:1", target="cuda:1")),
    ],
)
def test_devices_that_are_shared_in_another_way_are_refused(before: Bench, after: Bench) -> None:
    with pytest.raises(UsageError, match="devices are shared in another way"):
        compared(before, after)


def test_who_shares_devices_in_another_way_is_told_with_their_names() -> None:
    with pytest.raises(UsageError, match="cuda:0, cuda:1 before and cuda:1, cuda:1 after"):
        compared(on("cuda:0", target="cuda:1"), on("cuda:1"))


def test_another_machine_is_told_and_never_judged_unasked() -> None:
    one = bench(timed("eager", 100))
    other = one.model_copy(update={"device": "Another GPU"})
    assert "device: Made-up GPU before, Another GPU after" in compared(one, other).differences
    with pytest.raises(UsageError, match="would judge two machines") as caught:
        compared(one, other, "step_ms > +3%")
    assert "--other-machine" in caught.value.hint
    found = compared(one, other, "step_ms > +3%", other_machine=True)
    assert change(found).regression is False


def test_a_compile_cache_that_held_more_is_told() -> None:
    held = measured("graphed").graphs
    assert held is not None
    old = measured("graphed", graphs=held.model_copy(update={"compiled": 9, "cached": 0}))
    one, other = bench(measured("eager"), old), bench(measured("eager"), measured("graphed"))
    told = "graphs that torch's compile cache held: 0 of 9 before, 7 of 9 after"
    assert told in compared(one, other).differences
    alone = bench(measured("eager"))
    assert not compared(alone, other).differences  # it is of rows that both have
    unknown = measured("graphed", graphs=held.model_copy(update={"compiled": None, "cached": None}))
    assert not compared(bench(measured("eager"), unknown), other).differences


def test_versions_options_weather_and_interruptions_are_told() -> None:
    one = sample()
    packages = ENVIRONMENT.packages | {"torch": "2.12.1"}
    environment = ENVIRONMENT.model_copy(update={"packages": packages, "driver": "590.2"})
    options = one.options | {"turn_steps": 5}
    other = one.model_copy(
        update={"environment": environment, "complete": False, "options": options}
    )
    found = compared(one, other)
    assert "torch: 2.11.0+cu130 before, 2.12.1 after" in found.differences
    assert "driver: 580.1 before, 590.2 after" in found.differences
    assert "option turn_steps: 25 before, 5 after" in found.differences
    assert "after is incomplete" in found.notes
    assert "before: throttled: hardware slowdown, in 12% of the samples" in found.notes
