"""Softmax in C: within its error bound of float64, at every width that this machine can run or emulate."""

import ctypes
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowband.cost.softmax import ALGORITHMS, PASSES, TWO_PASS, traffic_bytes
from lowband.errors import UserError
from lowband.kernels import c_library, softmax_cpu
from lowband.kernels.softmax_cpu import ISAS, SOURCE, error_bound, kernels, missing, reference, softmax
from tests.called import called
from tests.refused import refusal

INF, NAN = float("inf"), float("nan")
SIMDE = Path("/usr/include/simde/x86/avx512.h")  # Debian's libsimde-dev: AVX-512's intrinsics in plain C
EMULATED = "AVX512 emulated"
SIZES = [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 8191, 8192, 8193, 20_011]

needs_compiler = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not any(map(shutil.which, c_library.COMPILERS)),
    reason="no x86 processor or no C compiler",
)

Run = Callable[[str, np.ndarray, np.ndarray], None]


@pytest.fixture(scope="module", params=[*ISAS, EMULATED])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The functions of one width: (algorithm, x, y) -> None."""
    if not any(map(shutil.which, c_library.COMPILERS)):
        pytest.skip("no C compiler")
    if request.param != EMULATED:
        if missing(request.param):
            pytest.skip(missing(request.param))
        return kernels(request.param).run
    if not SIMDE.exists() or missing("AVX2"):
        pytest.skip(f"AVX-512 cannot be emulated: no {SIMDE} (libsimde-dev), or {missing('AVX2')}")
    library = tmp_path_factory.mktemp("simde") / "softmax.so"
    headers = (
        "-include",
        "immintrin.h",
        "-include",
        str(SIMDE),
    )  # the second renames what the first declares
    flags = ("-std=gnu11", "-O1", "-DLANES=16", "-mavx2", "-mfma", "-DSIMDE_ENABLE_NATIVE_ALIASES", *headers)
    c_library.build(SOURCE, flags, library)
    loaded = ctypes.CDLL(str(library))
    return lambda name, x, y: softmax_cpu._function(loaded, name)(*softmax_cpu._pointers(x, y))


def computed(run: Run, algorithm: str, x: np.ndarray) -> np.ndarray:
    """The output, from a poisoned vector between two guards that must stay."""
    room = np.full(len(x) + 32, NAN, np.float32)
    room[:16] = room[-16:] = 7
    run(algorithm, x, room[16:-16])
    assert (room[:16] == 7).all() and (room[-16:] == 7).all(), "written outside of the output"
    return room[16:-16]


def assert_right(run: Run, algorithm: str, x: np.ndarray) -> None:
    y, exact = computed(run, algorithm, x), reference(x)
    if np.isnan(exact).any():
        assert np.isnan(y).all()
        return
    wrong = ~(np.abs(y - exact) <= error_bound(x, algorithm))
    assert not wrong.any(), (len(x), np.flatnonzero(wrong)[:3], x[wrong][:3], y[wrong][:3], exact[wrong][:3])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=150)
@given(
    n=st.sampled_from(SIZES),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 20.0, 1000.0, 4e4, 1e6, 1e30, 3e38]),
    offset=st.sampled_from([0.0, 50.0, -120.0, 3e4, -4.2e4, 4.6e4, 1e6, -3e6, -1e9, 1e30]),
    odd=st.lists(st.sampled_from([-INF, 3.4e38, -3.4e38, 0.0, 1e-45]), max_size=5),
    seed=st.integers(0, 10_000),
)
@example(n=2, scale=0.0, offset=-1e9, odd=[-INF], seed=0)
def test_within_the_bound_of_float64(run, algorithm, n, scale, offset, odd, seed) -> None:
    random = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = (offset + scale * random.uniform(-1, 1, n)).astype(np.float32)
    for value in odd:
        x[random.integers(n)] = value
    assert_right(run, algorithm, x)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=150)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=70))
def test_any_floats_at_all(run, algorithm, values) -> None:
    assert_right(run, algorithm, np.array(values, np.float32))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_power_of_two_between_largest_and_smallest(run, algorithm) -> None:
    """All exponents that a result can have, flushed ones included, each in a vector's every lane."""
    for lane in range(33):
        x = np.concatenate([np.full(lane, -INF), np.linspace(0, -110, 1111)]).astype(np.float32)
        assert_right(run, algorithm, x)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "values",
    [[NAN, 1, 2], [1] * 40 + [NAN], [INF, 1], [INF, INF], [INF, -INF], [-INF], [-INF] * 40, [NAN] * 9],
)
def test_what_has_no_softmax_is_nan_everywhere(run, algorithm, values) -> None:
    assert np.isnan(computed(run, algorithm, np.array(values, np.float32))).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sum_of_millions_keeps_its_digits(run, algorithm) -> None:
    """A lane that kept one fp32 sum would be off by a percent: equal terms round the same way each time."""
    n = 2**22
    y = computed(run, algorithm, np.full(n, 0.1, np.float32))
    assert np.abs(y * np.float64(n) - 1).max() < 2e-5


def test_two_pass_is_exact_where_three_pass_rounds(run) -> None:
    """x - max is rounded in fp32 where it is long; two-pass never forms it."""
    x = np.array([1.2345678, -80.123456, -70.98765], np.float32)
    off = {name: np.abs(computed(run, name, x) / reference(x) - 1).max() for name in ALGORITHMS}
    assert off[TWO_PASS] < 5e-7 < min(off[name] for name in ALGORITHMS if name != TWO_PASS)


@pytest.mark.parametrize("name", PASSES)
def test_passes_that_only_move_data_do_move_it(run, name) -> None:
    x, y = np.arange(1, 1001, dtype=np.float32), np.full(1000, 3, np.float32)
    run(name, x, y)
    expected = {"read": [1000, *[3] * 999], "scale": x / 2, "scale in place": [1.5] * 1000}[name]
    assert np.array_equal(y, np.array(expected, np.float32))


def test_denormals_outside_are_left_as_they_were(run) -> None:
    computed(run, TWO_PASS, np.zeros(5, np.float32))
    assert np.float32(1e-38) * np.float32(0.1) > 0


@needs_compiler
@pytest.mark.parametrize("isa", ISAS)
def test_every_width_compiles(isa: str, tmp_path: Path) -> None:
    c_library.build(SOURCE, (*ISAS[isa].flags, "-Wall", "-Wextra", "-Werror"), tmp_path / "softmax.so")
    listing = called("objdump", "-d", "--no-show-raw-insn", tmp_path / "softmax.so")
    assert listing.returncode == 0
    assert ("zmm" in listing.stdout) == (isa == "AVX512")
    assert "vfmadd" in listing.stdout


def test_traffic_is_what_the_paper_counts() -> None:
    counted = {name: traffic_bytes(name, 1000) / 4000 for name in ALGORITHMS}
    assert counted == {"two-pass": 3, "three-pass recompute": 4, "three-pass reload": 5}


@pytest.mark.parametrize(
    ("x", "arguments", "words"),
    [
        (np.zeros(0, np.float32), {}, "shape (n,), n >= 1"),
        (np.zeros((2, 2), np.float32), {}, "shape (2, 2)"),
        (np.zeros(3), {}, "float64"),
        (np.zeros(3, np.float32), {"algorithm": "one-pass"}, "three-pass reload"),
        (np.zeros(3, np.float32), {"isa": "SSE"}, "AVX512, AVX2"),
    ],
)
def test_bad_input_is_refused(x, arguments, words) -> None:
    assert words in refusal(softmax, x, **arguments)


def test_where_nothing_can_be_had_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(softmax_cpu, "processor_features", frozenset)
    with pytest.raises(UserError, match="no AVX2 here"):
        softmax_cpu.Kernels("AVX2")
    monkeypatch.setenv("PATH", str(tmp_path))
    c_library.compiler.cache_clear()
    with pytest.raises(UserError, match="no C compiler"):
        c_library.compiler()
    monkeypatch.undo()
    c_library.compiler.cache_clear()


@needs_compiler
def test_a_strided_vector_is_taken() -> None:
    if missing("AVX2"):
        pytest.skip(missing("AVX2"))
    x = np.arange(10, dtype=np.float32)
    assert np.array_equal(softmax(x[::2]), softmax(x[::2].copy()))
