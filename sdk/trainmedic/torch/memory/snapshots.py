"""Serialization of a training state: this rank's tensors, then their pickled structure."""

from __future__ import annotations

import io
import mmap
import pickle
from dataclasses import dataclass
from typing import Any, Iterable, NamedTuple, Sequence

import torch

Buffer = mmap.mmap | memoryview | bytearray
_ALIGNMENT = 64  # bytes
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Errors from reading corrupt bytes.
UNREADABLE = (
    *(ValueError, LookupError, AttributeError, ImportError, TypeError, RuntimeError, EOFError),
    pickle.UnpicklingError,
)


class Place(NamedTuple):
    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self, memory: Buffer) -> torch.Tensor:
        """Return the tensor. Its storage is exactly its bytes, as ``torch.save`` needs."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        count = 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided(self.shape, self.stride)


class Layout:
    """Places of tensors, reused while their forms stay equal."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.ends: list[int] = []  # first free offset after each tensor

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Place a tensor. A different form invalidates later places."""
        shape = tensor.shape
        if number < len(self.places):
            place = self.places[number]
            if place.shape == shape and place.dtype is tensor.dtype and place.stride == tensor.stride():
                return
            del self.places[number:], self.ends[number:]
        offset = self.ends[-1] if self.ends else 0
        size = tensor.numel() * tensor.dtype.itemsize
        self.places.append(Place(offset, tensor.dtype, tuple(shape), _stride_in_memory(tensor)))
        self.ends.append(offset + -(-size // _ALIGNMENT) * _ALIGNMENT)


@dataclass(frozen=True)
class Snapshot:
    """A state before its tensors are copied."""

    tensors: Sequence[torch.Tensor]
    places: Sequence[Place]
    structure: bytes  # pickled places and pickled state, with numbers for the tensors
    structure_offset: int

    @property
    def size(self) -> int:
        return self.structure_offset + len(self.structure)

    def copy(self, memory: mmap.mmap, views: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
        """Copy into `memory`, whose `views_of` is ``views``."""
        for view, tensor in zip(views, self.tensors, strict=True):
            view.copy_(tensor, non_blocking=non_blocking)
        memory[self.structure_offset : self.size] = self.structure


class SnapshotTaker:
    def __init__(self, meshes: Sequence[Any] = ()) -> None:
        self._meshes = meshes
        self._layout = Layout()
        self._places: tuple[Place, ...] = ()
        self._pickled_places = pickle.dumps(())

    def take(self, state: Any) -> Snapshot:
        """Pickle the structure and place the tensors. Raises pickling errors."""
        buffer = io.BytesIO()
        packer = _Packer(buffer, self._layout, self._meshes)
        packer.dump(state)
        count = len(packer.tensors)
        places = tuple(self._layout.places[:count])
        if places != self._places:
            self._places, self._pickled_places = places, pickle.dumps([tuple(place) for place in places])
        structure_offset = self._layout.ends[count - 1] if count else 0
        return Snapshot(packer.tensors, self._places, self._pickled_places + buffer.getvalue(), structure_offset)


def views_of(memory: Buffer, places: Iterable[Place]) -> list[torch.Tensor]:
    return [place.tensor(memory) for place in places]


def read(memory: Buffer, structure_offset: int, size: int, meshes: Sequence[Any] = (), copies: bool = True) -> Any:
    """Return a snapshot's state, which must be this user's own because it is unpickled. Raises one of UNREADABLE.

    Without ``copies`` the tensors share ``memory``.
    """
    structure = io.BytesIO(memoryview(memory)[structure_offset:size])
    places = [Place(*fields) for fields in pickle.load(structure)]  # noqa: S301 - this user's own memory, checked
    return _Unpacker(structure, [_Reader(place, memory, copies) for place in places], meshes).load()


class _Packer(pickle.Pickler):
    """Pickles a state with numbers instead of tensors."""

    def __init__(self, file: io.BytesIO, layout: Layout, meshes: Sequence[Any]) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._layout = layout
        self._meshes = meshes
        # A tensor with several names, such as a tied weight, is stored once.
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, held: Any) -> Any:
        if not isinstance(held, torch.Tensor):
            return NotImplemented
        if type(held) in _PLAIN:
            if held.layout != torch.strided or held.is_quantized:
                return NotImplemented
            return _whole, (self._add(held.detach()),)
        sharded: Any = held
        if hasattr(sharded, "device_mesh"):
            mesh = next(number for number, mesh in enumerate(self._meshes) if mesh == sharded.device_mesh)
            number = self._add(sharded.detach().to_local())
            return _sharded, (number, mesh, sharded.placements, tuple(sharded.shape), sharded.stride())
        return NotImplemented

    def _add(self, tensor: torch.Tensor) -> int:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        number = self._numbers.get(key) if tensor.numel() else None
        if number is None:
            number = self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
            self._layout.add(number, tensor)
        return number


class _Reader:
    def __init__(self, place: Place, memory: Buffer, copies: bool) -> None:
        self._place = place
        self._memory = memory
        self._copies = copies
        self._tensor: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        if self._tensor is None:
            tensor = self._place.tensor(self._memory)
            self._tensor = tensor.clone() if self._copies else tensor
        return self._tensor


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, readers: Sequence[_Reader], meshes: Sequence[Any]) -> None:
        super().__init__(file)
        self._readers = readers
        self._meshes = meshes

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in (_whole.__name__, _sharded.__name__):
            return self._whole if name == _whole.__name__ else self._sharded
        return super().find_class(module, name)

    def _whole(self, number: int) -> torch.Tensor:
        return self._readers[number].read()

    def _sharded(self, number: int, mesh: int, placements: Any, shape: tuple[int, ...], stride: Any) -> Any:
        from torch.distributed.tensor import DTensor  # slow to import; a sharded training has it loaded

        tensor, device_mesh, size = self._readers[number].read(), self._meshes[mesh], torch.Size(shape)
        return DTensor.from_local(tensor, device_mesh, placements, run_check=False, shape=size, stride=stride)


# Their names are in snapshots that outlive a process.
def _whole(number: int) -> None:
    """Placeholder of a tensor, replaced by `_Unpacker`."""


def _sharded(number: int, mesh: int, placements: Any, shape: Any, stride: Any) -> None:
    """Placeholder of a sharded tensor."""


def _stride_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy."""
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    extent = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    if extent == tensor.numel() and min(tensor.stride()) > 0:
        return tuple(tensor.stride())
    return torch.empty(tensor.shape, device="meta").stride()
