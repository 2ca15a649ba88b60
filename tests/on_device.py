"""CPU tensors that say they are on a device, and a count of what would have to wait for that device."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
PACKAGE = str(Path(__file__).parents[1] / "src" / "polydraft")
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero"}
READS |= {"__array__", "masked_select", "unique", "equal", "allclose", "is_nonzero"}


MOVES = {"to", "copy_", "type_as", "__getitem__", "__setitem__", "__get__", "as_subclass", "new_tensor"}


class OnDevice(Tensor):
    """A tensor whose data are on the host, and whose device is another."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str | int) and torch.device(value).type == DEVICE.type


class Waits(TorchFunctionMode):
    """Run everything on the host, and count by place in the package what would wait for the device."""

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict = strict
        self.reads, self.uploads = Counter[str](), Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        there = [one for one in self._flat((*args, *kwargs.values())) if isinstance(one, OnDevice)]
        if name == "__get__":
            if func == Tensor.device.__get__:
                return DEVICE if isinstance(args[0], OnDevice) else torch.device("cpu")
            if func == Tensor.is_cuda.__get__:
                return isinstance(args[0], OnDevice)
        to_host = name == "cpu" or (name == "to" and self._target(args, kwargs) == "cpu")
        if there and (name in READS or to_host or self._masked(name, args)):
            self.reads[self._place(name)] += 1
        upload = name == "to" and not isinstance(args[0], OnDevice) and self._target(args, kwargs) == DEVICE.type
        made = is_device(kwargs.get("device")) if kwargs.get("device") is not None else False
        if upload or (made and name in ("tensor", "as_tensor")) or self._mixed(name, args):
            if not (name == "to" and kwargs.get("non_blocking")):
                self.uploads[self._place(name)] += 1
        if self.strict:
            self._apart(name, args, kwargs)
        args = tuple(torch.device("cpu") if isinstance(one, torch.device) and is_device(one) else one for one in args)
        if made:
            kwargs["device"] = torch.device("cpu")
        found = func(*args, **kwargs)
        if to_host or name in ("numpy", "tolist", "item"):
            return self._plain(found.clone() if to_host and there else found)  # a device's memory is apart
        if (made or upload) and isinstance(found, Tensor):
            return on_device(found.clone() if upload else found)
        return found

    @classmethod
    def _apart(cls, name: str, args: Any, kwargs: Any) -> None:
        """Notice tables of the host and of the device in one operation, which a real device refuses."""
        if name in MOVES:
            return
        tables = [one for one in cls._flat((*args, *kwargs.values())) if isinstance(one, Tensor) and one.dim()]
        kinds = {isinstance(one, OnDevice) for one in tables}
        assert len(kinds) < 2, f"{cls._place(name)} mixes the host and the device"

    @staticmethod
    def _flat(values: Any) -> Iterator[Any]:
        for value in values:
            if isinstance(value, list | tuple):
                yield from Waits._flat(value)
            else:
                yield value

    @staticmethod
    def _plain(found: Any) -> Any:
        return found.as_subclass(Tensor) if isinstance(found, Tensor) else found

    @staticmethod
    def _target(args: Any, kwargs: Any) -> str:
        """Return where `to` moves a tensor."""
        named = [one for one in (*args[1:2], kwargs.get("device")) if isinstance(one, torch.device | str)]
        others = [one for one in (*args[1:2], kwargs.get("other")) if isinstance(one, Tensor)]
        if others:
            return DEVICE.type if isinstance(others[0], OnDevice) else "cpu"
        return torch.device(named[0]).type if named else ""

    @staticmethod
    def _masked(name: str, args: Any) -> bool:
        """Tell whether a mask on the device is made into places."""
        if name not in ("__getitem__", "__setitem__"):
            return False
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [one for one in keys if isinstance(one, OnDevice) and one.dtype == torch.bool]
        return bool(masks) and not (name == "__setitem__" and not isinstance(args[2], Tensor))

    @staticmethod
    def _mixed(name: str, args: Any) -> bool:
        """Tell whether places on the host are looked up on the device."""
        if name not in ("__getitem__", "__setitem__") or not isinstance(args[0], OnDevice):
            return False
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any((isinstance(one, Tensor) and not isinstance(one, OnDevice)) or isinstance(one, list) for one in keys)

    @staticmethod
    def _place(name: str) -> str:
        frame = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back  # type: ignore[assignment]
        if not frame:
            return f"outside: {name}"
        return f"{frame.f_code.co_filename.removeprefix(PACKAGE)[1:]}:{frame.f_lineno} {frame.f_code.co_name}: {name}"


def moved(model: nn.Module) -> nn.Module:
    """Let a model's weights say that they are on the device."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, one in table.items():
                if one is not None:
                    table[name] = on_device(one.detach())  # type: ignore[assignment]
    return model


@contextmanager
def counted(strict: bool = True) -> Iterator[Waits]:
    """Count what is waited for inside; models that mix host and device are let pass unless it is strict."""
    with Waits(strict) as waits:
        yield waits
