"""What a profile says: kernels by what they are for, and the time in which none ran."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dflash_bench.kernels import Kernel, group_of, profile_steps, summary


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("triton_tem_fused_flex_attention_2", "attention forward"),
        ("triton_tem_fused_flex_attention_backward_3", "attention backward"),
        ("triton_red_fused_flex_attention_backward_zeros_1", "attention backward"),
        ("triton_red_fused__to_copy_amax_exp_sub_sum_0", "LM-head kernels"),
        ("triton_per_fused__to_copy_mean_mul_pow_rsqrt_1", "elementwise"),
        ("triton_poi_fused__to_copy_add_copy__div_sqrt_sub_where_0", "optimizer"),
        ("triton_poi_fused_mul_silu_5", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::sbtopk::gatherTopK<long, unsigned int, 1, false>", "anchors and mask"),
        ("something_nobody_knows", "other"),
    ],
)
def test_a_kernel_belongs_to_the_group_that_its_name_tells(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_gaps_are_the_time_in_which_no_kernel_ran() -> None:
    kernels = [
        Kernel("nvjet_a", 100.0, 50.0),
        Kernel("nvjet_b", 120.0, 10.0),  # inside the one before, on another stream
        Kernel("Memset", 160.0, 20.0),
        Kernel("nvjet_a", 200.0, 100.0),
    ]
    found = summary(kernels, num_steps=2, with_gaps=True)
    assert found.gaps_ms == pytest.approx((10.0 + 20.0) / 1e3 / 2)
    assert found.groups_ms == pytest.approx({"matrix products": 0.080, "copies": 0.010})
    assert found.launches == {"nvjet_a": 1.0, "nvjet_b": 0.5, "Memset": 0.5}
    assert "matrix products" in found.text()


def test_a_cpu_is_profiled_by_operators() -> None:
    left = torch.randn(128, 128)
    worker = ThreadPoolExecutor(1)

    def run(count: int) -> None:
        for _ in range(count):
            worker.submit(torch.mm, left, left).result()

    found = profile_steps(run, count=3, device=torch.device("cpu"))
    assert found.gaps_ms is None
    assert found.launches["aten::mm"] == 1.0
    assert found.groups_ms["matrix products"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_profiled_by_kernels_with_their_gaps() -> None:
    left = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)

    def run(count: int) -> None:
        for _ in range(count):
            (left @ left).relu()

    found = profile_steps(run, count=4, device=torch.device("cuda"))
    assert found.groups_ms["matrix products"] > 0
    assert found.groups_ms["elementwise"] > 0
    assert found.gaps_ms is not None
    assert all(launches == 1.0 for launches in found.launches.values())
