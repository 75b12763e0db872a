"""Compile every Triton kernel for the papers' machines, without the machines: registers, spills, memory.

Triton includes both back ends, so a CPU can compile for all targets. This proves that a kernel compiles and
fits, not that it is right or fast there. In a process with TRITON_INTERPRET=1 kernels cannot be compiled.
"""

import csv
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowband.kernels.variant import Variant
from lowband.spec.files import write_whole

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "gfx90a": GPUTarget("hip", "gfx90a", 64),  # MI250X
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300X
}
# Most per block (CUDA C++ Programming Guide, table of compute capabilities; CDNA ISA guides: LDS).
SHARED_LIMIT_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx90a": 64 * 1024, "gfx942": 64 * 1024}
TOOL_TIME_LIMIT_S = 60

# Matrix-unit instructions in the targets' assembly.
_MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|v_mfma_\w+)")
_ASYNCHRONOUS = "wgmma.mma_async"  # sm_90's: the next product is issued while the last one runs
_SERIALIZED = re.compile(r"\(C75\d\d\)")  # ptxas' notes that it makes each wait for the one before


class Compiled(NamedTuple):
    """One row: a variant on a target. Registers (AMD: vector registers) and spilled bytes are per thread.

    serialized: notes of ptxas that it makes asynchronous matrix products wait for each other
    """

    kernel: str
    config: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    shared_limit_bytes: int
    matrix_instructions: int
    serialized: int
    triton: str


def variants(target: str) -> Iterator[Variant]:
    """Every kernel: each `<kernel>_triton.py` of this folder lists its own in `variants(device)`."""
    device = "hip" if target.startswith("gfx") else "cuda"
    for path in sorted(Path(__file__).parent.glob("*_triton.py")):
        yield from import_module(f"lowband.kernels.{path.stem}").variants(device)


def compile_all(targets: list[str], path: Path, print_line: Callable[[str], None]) -> None:
    """Write a row for every variant on the targets. Raises the compiler's errors."""
    rows = []
    for target in targets:
        for variant in variants(target):
            rows.append(compile_variant(variant, target))
            print_line(" ".join(map(str, rows[-1])))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Compiled._fields)
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def compile_variant(variant: Variant, target: str) -> Compiled:
    is_tuned = isinstance(variant.function, triton.runtime.Autotuner)
    function = variant.function.fn if is_tuned else variant.function
    signature, attributes = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = variant.pointers.get(name, "fp32" if name in variant.floats else "i32")
        is_stride = name.endswith(("stride", "_b", "_n", "_t"))
        if name in variant.pointers or is_stride or name in variant.aligned:
            attributes[i,] = [["tt.divisibility", 16]]  # as the launcher infers for aligned tensors
    source = ASTSource(function, signature, variant.constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=variant.options)
    assembly = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]
    registers, spilled = _cubin(compiled.asm["cubin"]) if "ptx" in compiled.asm else _amdgcn(assembly)
    return Compiled(
        variant.kernel, variant.config, target, registers, spilled, compiled.metadata.shared,
        SHARED_LIMIT_BYTES[target], len(_MATRIX.findall(assembly)), _serialized(assembly), triton.__version__,
    )  # fmt: skip


def _cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a CUDA kernel; these kernels' stacks hold only spilled registers."""
    usage = _told("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def _serialized(assembly: str) -> int:
    if _ASYNCHRONOUS not in assembly:
        return 0
    target = re.search(r"^\.target (\w+)", assembly, re.MULTILINE)
    assert target, assembly[:400]
    told = _told("ptxas", assembly.encode(), "-v", f"--gpu-name={target[1]}", "-o", os.devnull)
    return len(_SERIALIZED.findall(told))


def _told(tool: str, file: bytes, *options: str) -> str:
    """What one of NVIDIA's tools, of Triton's own, prints about a file."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile() as given:
        given.write(file)
        given.flush()
        command = [path, *options, given.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TOOL_TIME_LIMIT_S)
    return done.stdout + done.stderr


def _amdgcn(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of spilled ones, from the metadata of an AMD kernel."""
    counts = {
        key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly)
    }
    return counts["vgpr_count"], 4 * counts["vgpr_spill_count"]
