"""A stand-in for device memory on machines without a device: only copies can access it."""

from typing import Any

import torch

aten = torch.ops.aten
DEVICE = torch.device("privateuseone", 0)
_VIEWS = (aten.detach, aten.view, aten._unsafe_view, aten.slice, aten.alias)


class OnDevice(torch.Tensor):
    """Supports copies from and to the host within one dtype, and some views, but no other
    operation. It reports a device for which torch has no kernels; torch's own kernels see a tensor
    on meta."""

    host: torch.Tensor
    copied: list[int] = []
    """Bytes of each copy to the device."""
    fetched: list[int] = []
    """Bytes of each copy to the host."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device="meta"
        )
        made.host = host
        return made

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def forget(cls) -> None:
        cls.copied.clear()
        cls.fetched.clear()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is aten.copy_:
            to, source = args[:2]
            assert (type(to) is cls) != (type(source) is cls), "one of two is on the device"
            assert source.dtype == to.dtype, "a copy that casts takes memory on the device"
            (cls.copied if type(to) is cls else cls.fetched).append(source.nbytes)
            _host_of(to).copy_(_host_of(source))
            return to
        if packet is aten._to_copy:
            # Only a copy to the host, without a cast, is supported.
            due = {**(kwargs or {}), "device": torch.device("cpu")}
            assert kwargs == due and due.get("dtype", args[0].dtype) == args[0].dtype, kwargs
            cls.fetched.append(args[0].nbytes)
            return args[0].host.clone()
        assert packet in _VIEWS, func
        return cls(func(*(_host_of(a) for a in args), **(kwargs or {})))


def _host_of(value: Any) -> Any:
    return value.host if isinstance(value, OnDevice) else value
