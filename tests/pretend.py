"""A GPU that is not there: tensors that say they are on cuda:0, compute on the CPU, and refuse company from the CPU.

On a machine without a GPU nothing else notices that two tensors of an operation are on different devices. What it does
not see: operations inside of torch's C++, where CUDA's autocast differs from the CPU's, and speed.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda:0")
# which may mix: they copy, also from device to device, or take indices from the CPU
MAY_MIX = {"to", "copy_", "__getitem__", "__setitem__", "__set__", "__deepcopy__", "type_as"}


def is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


class Pretend(TorchFunctionMode):
    """Marks tensors that would be on the GPU, and says so where operations mix them with others."""

    def __init__(self):
        super().__init__()
        self.marked = 0

    def mark(self, out):
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                x.pretends, self.marked = True, self.marked + 1
        return out

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        full = resolve_name(func) or name
        pretends = lambda x: vars(x).get("pretends", False)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if pretends(x)]
        if name == "__get__" and tensors:
            out = func(*args, **kwargs)
            if isinstance(out, torch.device):
                return CUDA if here else out
            return self.mark(out) if here and isinstance(out, torch.Tensor) else out
        target = kwargs.get("device")
        if name in ("to", "cpu"):
            asked = [x for x in (*args[1:], target, *["cpu"] * (name == "cpu")) if isinstance(x, (str, torch.device))]
            on_cpu = lambda x: "cpu" if isinstance(x, (str, torch.device)) else x
            out = func(args[0], *map(on_cpu, args[1:]), **{key: on_cpu(value) for key, value in kwargs.items()})
            was = pretends(args[0])
            will = is_cuda(asked[0]) if asked else was
            if out is args[0] and will != was:
                out = out.clone()  # what moves is a new tensor
            return self.mark(out) if will else out
        if is_cuda(target):
            kwargs["device"] = torch.device("cpu")
            return self.mark(func(*args, **kwargs))
        indexed = name in ("__getitem__", "__setitem__") and not pretends(args[0])  # on the CPU by what is on the GPU
        if here and (name not in MAY_MIX or indexed):
            strangers = [x for x in tensors if not pretends(x) and x.dim() > 0]
            if strangers:
                shapes = [tuple(x.shape) for x in (here[0], strangers[0])]
                raise RuntimeError(f"{full}: tensors on two devices, cuda:0 {shapes[0]} and cpu {shapes[1]}")
        out = func(*args, **kwargs)
        if name in ("tolist", "item", "numpy"):
            return out
        # what is copied into a tensor, or taken from it, is where that tensor is
        owner = args and isinstance(args[0], torch.Tensor) and name in MAY_MIX
        return self.mark(out) if (pretends(args[0]) if owner else bool(here)) else out


@contextmanager
def pretended_gpu():
    """Within it there is one GPU, and the mode that watches over it."""
    with pytest.MonkeyPatch.context() as patch, Pretend() as mode:
        move = torch.nn.Module.to

        def to(module, *args, **kwargs):
            where = [x for x in (*args, *kwargs.values()) if isinstance(x, (str, torch.device))]
            if where and is_cuda(where[0]):
                mode.mark([*module.parameters(), *module.buffers()])
                return module
            return move(module, *args, **kwargs)

        patch.setattr(torch.nn.Module, "to", to)
        autocast = torch.autocast  # that of the CPU computes in bfloat16 too
        patch.setattr(torch, "autocast", lambda kind, *args, **kwargs: autocast("cpu", *args, **kwargs))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
        try:
            yield mode
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
