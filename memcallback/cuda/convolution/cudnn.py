"""A ctypes binding to the cuDNN backend API, which works without a device.

The numbers are those of cudnn_graph.h; NVIDIA's documentation of the cuDNN backend API explains
them.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import lru_cache
from typing import Any

from memcallback.core.torch_private import is_cuda_initialized, is_cuda_refused
from memcallback.devices.catalogue import CATALOGUE, DeviceSpec


class Kind(IntEnum):
    """Kinds of descriptors."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    PLAN = 5
    KNOB_CHOICE = 7
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Attribute(IntEnum):
    """Attributes of descriptors."""

    CONVOLUTION_DTYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_NUM_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIG_ENGINE = 300
    CONFIG_KNOBS = 302
    CONFIG_WORKSPACE = 303
    PLAN_CONFIG = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    KNOB_TYPE = 600
    KNOB_VALUE = 601
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_DTYPE = 901
    TENSOR_SHAPE = 902
    TENSOR_STRIDES = 903
    TENSOR_ID = 906
    TENSOR_IS_VIRTUAL = 907
    ENGINE_NUMBER = 1301
    ENGINE_NOTES = 1303
    ENGINE_BEHAVIOR = 1305
    DEVICE_TEXT = 2702


class Type(IntEnum):
    """Types of attributes."""

    DTYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEURISTICS_MODE = 8
    KNOB = 9
    NOTE = 11
    DESCRIPTOR = 15
    BEHAVIOR = 19
    CHAR = 24


_C_TYPES: dict[Type, Any] = {
    Type.BOOLEAN: ctypes.c_bool,
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.DOUBLE: ctypes.c_double,
    Type.DESCRIPTOR: ctypes.c_void_p,
}
#: Versions of a device's description, newest first; a cuDNN refuses versions newer than itself.
_SCHEMAS = (4, 3, 2, 1)
#: The first version that takes the description of a device.
_OLDEST = 90800


class CuDNNError(Exception):
    """cuDNN refused a call."""


class CuDNN:
    """The backend functions of a loaded library.

    Attributes:
        version: Such as 91900.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.cudnnGetVersion.restype = ctypes.c_size_t
        library.cudnnBackendCreateDescriptor.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.cudnnBackendDestroyDescriptor.argtypes = [ctypes.c_void_p]
        library.cudnnBackendFinalize.argtypes = [ctypes.c_void_p]
        values: list[Any] = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        library.cudnnBackendSetAttribute.argtypes = values
        library.cudnnBackendGetAttribute.argtypes = [*values, ctypes.c_void_p]
        self._library = library
        self._devices: dict[str, int] = {}
        self.version = int(library.cudnnGetVersion())

    def create(self, kind: int, stack: ExitStack) -> int:
        """Create a descriptor, which is destroyed when the stack is left."""
        descriptor = ctypes.c_void_p()
        self._check(
            self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(descriptor)),
            f"cannot create descriptor {kind}",
        )
        stack.callback(self._library.cudnnBackendDestroyDescriptor, descriptor.value)
        return int(descriptor.value or 0)

    def set(self, descriptor: int, attribute: int, type_: Type, *values: Any) -> None:
        """Set an attribute."""
        array = (_C_TYPES.get(type_, ctypes.c_int) * len(values))(*values)
        status = self._library.cudnnBackendSetAttribute(
            descriptor, attribute, type_, len(values), array
        )
        self._check(status, f"cannot set attribute {attribute}")

    def count(self, descriptor: int, attribute: int, type_: Type) -> int:
        """Count the values of an attribute."""
        count = ctypes.c_int64()
        status = self._library.cudnnBackendGetAttribute(
            descriptor, attribute, type_, 0, ctypes.byref(count), None
        )
        self._check(status, f"cannot read attribute {attribute}")
        return count.value

    def get(
        self, descriptor: int, attribute: int, type_: Type, room: int, into: Sequence[int] = ()
    ) -> list[int]:
        """Read up to `room` values of an attribute; descriptors are filled in place."""
        array = (_C_TYPES.get(type_, ctypes.c_int) * room)(*into)
        count = ctypes.c_int64()
        status = self._library.cudnnBackendGetAttribute(
            descriptor, attribute, type_, room, ctypes.byref(count), array
        )
        self._check(status, f"cannot read attribute {attribute}")
        return [int(value or 0) for value in array[: min(count.value, room)]]

    def finalize(self, descriptor: int) -> bool:
        """Complete a descriptor; return whether cuDNN supports it."""
        return int(self._library.cudnnBackendFinalize(descriptor)) == 0

    def finalized(self, descriptor: int) -> int:
        """Complete a descriptor, or raise."""
        self._check(not self.finalize(descriptor), "a descriptor was refused")
        return descriptor

    def describes_devices(self) -> bool:
        """Whether a device can be described; not if a library that cuDNN loads then is missing."""
        try:
            with device_hidden():
                self.device(CATALOGUE[0])
        except CuDNNError:
            return False
        return True

    def device(self, device: DeviceSpec) -> int:
        """The descriptor of a device, created once."""
        facts = _facts(device, self.version)
        key = json.dumps(facts)
        if key not in self._devices:
            self._devices[key] = self._described(facts)
        return self._devices[key]

    def _described(self, facts: dict[str, Any]) -> int:
        for schema in _SCHEMAS:
            with ExitStack() as stack:
                descriptor = self.create(Kind.DEVICE, stack)
                text = json.dumps({**facts, "schemaVersion": schema}).encode()
                status = self._library.cudnnBackendSetAttribute(
                    descriptor, Attribute.DEVICE_TEXT, Type.CHAR, len(text), text
                )
                if status == 0 and self.finalize(descriptor):
                    stack.pop_all()
                    return descriptor
        raise CuDNNError("the device was refused")

    def _check(self, status: int, problem: str) -> None:
        if status:
            raise CuDNNError(f"{problem} (status {int(status)})")


@lru_cache(maxsize=1)
def load() -> CuDNN | None:
    """Load the installed cuDNN, if it answers without a device; None without one.

    9.8 and newer do, but 9.28 only where a CUDA driver is installed.
    """
    for path in [*_package_libraries(), "libcudnn.so.9"]:
        try:
            library = CuDNN(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
        if library.version >= _OLDEST and library.describes_devices():
            return library
    return None


def is_available() -> bool:
    """Whether a cuDNN is installed that answers without a device."""
    return load() is not None


def version() -> int | None:
    """The version of the cuDNN that answers, such as 91900; None without one."""
    library = load()
    return None if library is None else library.version


def finds_device() -> bool:
    """Whether this process uses CUDA, so that cuDNN finds a device.

    False in the child that predicts, where the device is hidden, and before CUDA is initialized:
    asking would initialize the driver. If cuDNN does find a device before that, some plans come
    twice, from a rule and from cuDNN's list.
    """
    return not is_cuda_refused() and is_cuda_initialized()


@contextmanager
def device_hidden() -> Iterator[None]:
    """Let cuDNN find no device in the child that predicts; elsewhere nothing changes.

    Where cuDNN finds a device, a question makes it open a context there, beside the training, and
    the answers are others than on a machine without a device.
    """
    if not is_cuda_refused():
        yield
        return
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _package_libraries() -> Iterator[str]:
    """Paths in nvidia-cudnn-cu12 and nvidia-cudnn-cu13, which CUDA builds of torch install."""
    for folder in sys.path:
        yield from glob.glob(
            os.path.join(glob.escape(folder), "nvidia", "cudnn", "lib", "libcudnn.so.9")
        )


def _facts(device: DeviceSpec, version: int) -> dict[str, Any]:
    """The description of a device for cuDNN, without its version."""
    major, minor = device.compute_capability
    return {
        "cudnnVersion": version,
        "maxGridSize": [2147483647, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "multiProcessorCount": device.num_multiprocessors,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": device.shared_memory_per_block_bytes,
        "maxSharedMemoryPerBlockOptin": device.shared_memory_per_block_optin_bytes,
        "reservedSharedMemoryPerBlock": 1024 if major >= 8 else 0,
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": device.max_blocks_per_multiprocessor,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": device.max_threads_per_multiprocessor,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": device.capacity_bytes,
        "smClockRateKHz": device.clock_khz,
        "memClockRateKHz": device.memory_clock_khz,
        "l2CacheSize": device.l2_cache_bytes,
        "cudaDeviceId": 0,
        "deviceVer": major * 100 + minor * 10,
        "driverVer": 13000,
        "deviceName": device.name,
    }
