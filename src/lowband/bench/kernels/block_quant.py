"""Messages of the quantized wires: our kernels and the reference in torch, eager and compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowband.bench.kernels.measure import KernelCase
from lowband.errors import UserError
from lowband.kernels.block_quant import dequantize, fast_path, quantize
from lowband.spec.kernel_rows import KernelRow
from lowband.spec.wire import quantized_bytes

BLOCK = 256
PARTNERS = 8  # messages summed
PARTS = 2  # messages into which a sum is encoded
# Values per message. Parts of the odd sizes have an odd number of blocks, as shards of most models do.
SIZES = {"cuda": (2**22, 2**26 - 512, 2**26, 2**28), "cpu": (2**13 - 512,)}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}  # Triton's interpreter stores bf16 wrongly
CHECKED = 2**16  # values at each end of a message that are compared with the CPU's


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    for bits in (8, 4):
        for n in SIZES[device.type]:
            yield from _Size(device, bits, n).groups()


class _Size:
    """One message length at one width."""

    def __init__(self, device: torch.device, bits: int, n: int) -> None:
        self.device, self.bits, self.n = device, bits, n
        self.dtype = DTYPE[device.type]
        self.message = quantized_bytes(n, bits, BLOCK)

    def groups(self) -> Iterator[list[KernelCase]]:
        values = self.dtype.itemsize * self.n
        encode = [
            self._case("encode", "triton", values + self.message, self._encode, self._error_of_codes),
            self._case("encode", "torch", None, self._reference_encode, self._share_of_other_codes, 1e-2),
        ]
        if self.device.type == "cuda":  # on a CPU, torch's C++ compiler takes minutes
            make = self._compiled_encode
            encode.append(self._case("encode", "torch.compile", None, make, self._share_of_other_codes, 1e-2))
        yield encode
        yield [
            self._case("decode", "triton", values + self.message, self._decode, self._error_of_values),
            self._case("decode", "torch", None, self._reference_decode, self._error_of_values),
        ]
        if self.n > 2**26:
            return
        summed = PARTNERS * self.message
        yield [self._case("decode_sum", "triton", summed + 4 * self.n, self._sum, self._error_of_sum)]
        moved = summed + PARTS * quantized_bytes(self.n // PARTS, self.bits, BLOCK)
        yield [self._case("sum_encode", "triton", moved, self._sum_encode, self._error_of_resum)]

    def _case(
        self, operation: str, implementation: str, moved: int | None,
        make: Callable[[], Callable[[], Any]], error_of: Callable[[Any], float],
        tolerance: float = 0,
    ) -> KernelCase:  # fmt: skip
        row = KernelRow(
            part="block_quant", operation=f"{operation} int{self.bits}", implementation=implementation,
            dtype=str(self.dtype).removeprefix("torch."), rows=1, columns=self.n, bytes=moved,
            partners=PARTNERS if "sum" in operation else 1,
        )  # fmt: skip
        return KernelCase(row=row, make=make, error_of=error_of, tolerance=tolerance)

    def _kernels(self) -> Any:
        kernels = fast_path(self.device, BLOCK)
        if kernels is None:
            raise UserError(f"no Triton kernels on {self.device.type}")
        return kernels

    def _values(self) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(self.bits)
        return torch.randn(1, self.n, generator=generator, device=self.device).to(self.dtype)

    def _messages(self) -> torch.Tensor:
        """[PARTNERS, length], all equal, because the time does not depend on the values summed."""
        return self._kernels().encode(self._values(), self.bits, BLOCK).repeat(PARTNERS, 1)

    def _encode(self) -> Callable[[], torch.Tensor]:
        kernels, values = self._kernels(), self._values()
        return lambda: kernels.encode(values, self.bits, BLOCK)

    def _reference_encode(self) -> Callable[[], Any]:
        values = self._values()
        return lambda: quantize(values, self.bits, BLOCK)

    def _compiled_encode(self) -> Callable[[], Any]:
        torch.compiler.reset()  # else the second length is compiled for any length
        compiled, values = torch.compile(quantize, dynamic=False), self._values()
        return lambda: compiled(values, self.bits, BLOCK)

    def _decode(self) -> Callable[[], torch.Tensor]:
        kernels, message = self._kernels(), self._messages()[:1]
        out = torch.empty(1, self.n, dtype=self.dtype, device=self.device)

        def work() -> torch.Tensor:
            kernels.decode(message, out, self.bits, BLOCK)
            return out

        return work

    def _reference_decode(self) -> Callable[[], torch.Tensor]:
        message = self._messages()[:1]  # torch's own codes, made on a GPU, are not all the CPU's
        codes, scales = message.split(self.n * self.bits // 8, dim=1)[:2]
        arguments = codes.view(torch.int8), scales.view(torch.float32)[:, : self.n // BLOCK]
        return lambda: dequantize(*arguments, self.bits, BLOCK).to(self.dtype)

    def _sum(self) -> Callable[[], torch.Tensor]:
        kernels, messages = self._kernels(), self._messages()
        out = torch.empty(self.n, device=self.device)

        def work() -> torch.Tensor:
            kernels.decode_sum(messages, out, self.bits, BLOCK)
            return out

        return work

    def _sum_encode(self) -> Callable[[], torch.Tensor]:
        kernels, messages = self._kernels(), self._messages()
        return lambda: kernels.sum_encode(messages, self.n, PARTS, torch.float32, self.bits, BLOCK)

    def _ends(self, tensor: torch.Tensor) -> torch.Tensor:
        """[1, 2 CHECKED]: the first and the last values, on the CPU."""
        count = min(CHECKED, self.n // 2)
        return torch.cat((tensor[..., :count], tensor[..., -count:]), dim=-1).view(1, -1).cpu()

    def _error_of_codes(self, message: torch.Tensor) -> float:
        codes = message[:, : self.n * self.bits // 8]
        wanted, _ = quantize(self._ends(self._values()), self.bits, BLOCK)
        count = wanted.shape[1] // 2
        found = torch.cat((codes[:, :count], codes[:, -count:]), dim=1).cpu()
        return float((found != wanted.view(torch.uint8)).sum())

    def _expected(self, values: torch.Tensor) -> torch.Tensor:
        return dequantize(*quantize(values, self.bits, BLOCK), self.bits, BLOCK)

    def _share_of_other_codes(self, quantized: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Share of torch's codes that differ; a few may: on a GPU torch multiplies by a reciprocal."""
        return self._error_of_codes(quantized[0].view(torch.uint8)) / (2 * min(CHECKED, self.n // 2))

    def _error_of_values(self, out: torch.Tensor) -> float:
        wanted = self._expected(self._ends(self._values())).to(self.dtype)
        return float((self._ends(out) != wanted).sum())

    def _error_of_sum(self, out: torch.Tensor) -> float:
        return float((self._ends(out) != self._summed()).sum())

    def _summed(self) -> torch.Tensor:
        part = self._expected(self._ends(self._values()))
        total = part.clone()
        for _ in range(PARTNERS - 1):
            total += part
        return total

    def _error_of_resum(self, messages: torch.Tensor) -> float:
        length = self.n // PARTS * self.bits // 8
        wanted, _ = quantize(self._summed(), self.bits, BLOCK)
        count = wanted.shape[1] // 2
        found = torch.cat((messages[0, :count], messages[-1, length - count : length])).cpu()
        return float((found != wanted.view(torch.uint8)[0]).sum())
