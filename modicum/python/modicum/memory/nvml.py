"""The device memory in use, from NVIDIA's management library (NVML) if it is installed."""

import ctypes

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t. Values are bytes."""

    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class Devices:
    """The devices that NVML reports, in its order. Without its library or a driver there are none:
    a recording of host memory must not need them."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(library)
            self._open()
        except (OSError, AttributeError):
            self._handles = []

    def _open(self) -> None:
        if self._nvml.nvmlInit_v2() != 0:
            return
        count = ctypes.c_uint(0)
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    def used_bytes(self) -> list[int]:
        """Bytes in use on each device, by any process; 0 for a device that does not report them."""
        used = []
        for handle in self._handles:
            memory = _Memory()
            known = self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            used.append(memory.used if known else 0)
        return used
