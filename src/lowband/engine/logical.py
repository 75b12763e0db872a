"""A rank's range of a logical tensor, as torch.distributed.checkpoint (DCP) reads and writes it."""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class LogicalSlice(torch.Tensor):
    """A range of a flattened logical tensor, as DCP sees it (its `_Checkpointable` protocol).

    local: 1D, this rank's elements; start: where they lie; numel: elements of the logical tensor;
    writes: whether this rank is the one of its replicas that writes them
    """

    _start: int
    _numel: int
    _writes: bool

    @staticmethod
    def of(local: torch.Tensor, start: int, numel: int, writes: bool) -> "LogicalSlice":
        piece = torch.Tensor._make_subclass(LogicalSlice, local.detach())
        piece._start, piece._numel, piece._writes = start, numel, writes
        return piece

    def size(self, dim: int | None = None) -> Any:  # of the logical tensor: DCP compares it with the file's
        return torch.Size([self._numel]) if dim is None else self._numel

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        length = self._plain().numel()
        return [ChunkStorageMetadata(torch.Size([self._start]), torch.Size([length]))] if length else []

    def __create_write_items__(self, name: str, _object: Any) -> list[WriteItem]:
        if not self._writes:
            return []
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self._plain()), self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> torch.Tensor:
        return self._plain()
