"""A GPU that is not there: tensors that say they are on cuda:0, compute on the CPU, and refuse company from the CPU.

On a machine without a GPU nothing else notices that two tensors of an operation are on different devices, or that what
a CUDA graph is to repeat needs the CPU. What it does not see: operations inside of torch's C++, where CUDA's autocast
differs from the CPU's, tolist() and the like in a recording, and speed.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
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


class Graph:
    """torch.cuda.CUDAGraph: repeats operations on the very tensors that they were recorded with."""

    made = waited = 0  # graphs that were recorded, and how often the CPU waited for the GPU

    def __init__(self):
        self.calls = []

    def replay(self):
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again)):
                    if old.data_ptr() != new.data_ptr():  # no view, nor an operation in place
                        old.copy_(new)


# which need to know what the GPU has computed; lift_fresh copies from the CPU
WAITS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "allclose", "bincount"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "histc", "lift_fresh"}


class Recording(TorchDispatchMode):
    """torch.cuda.graph: records, and computes nothing. What waits for the GPU is an error, if it is one of WAITS."""

    def __init__(self, graph, stream):
        super().__init__()
        assert stream in STREAMS
        self.graph, self.written = graph, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        if name in WAITS or (name.startswith("index") and masks):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        with torch._C.DisableTorchFunction():
            for x, argument in zip(args, func._schema.arguments):
                if argument.alias_info and argument.alias_info.is_write:
                    self.written.append((x, x.clone()))
            out = func(*args, **kwargs)
        self.graph.calls.append((func, args, kwargs, out))
        return out

    def __enter__(self):
        self.random = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if exception[0]:
            raise torch.AcceleratorError("operation failed due to a previous error during capture\nCompile with ...")
        Graph.made += 1
        torch.set_rng_state(self.random)
        with torch._C.DisableTorchFunction():
            for x, before in reversed(self.written):
                x.copy_(before)


STREAMS = []


def wait(device):
    assert device in [stream.device for stream in STREAMS]
    Graph.waited += 1


@contextmanager
def pretended_graphs():
    """Within it there are CUDA graphs, on any device; yields the class of them, which counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "made", 0)
        patch.setattr(Graph, "waited", 0)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", Recording)
        patch.setattr(
            torch.cuda, "Stream", lambda device: STREAMS.append(SimpleNamespace(device=device)) or STREAMS[-1]
        )
        patch.setattr(torch.cuda, "synchronize", wait)
        yield Graph


@contextmanager
def pretended_gpu():
    """Within it there is one GPU, and the mode that watches over it."""
    with pytest.MonkeyPatch.context() as patch, pretended_graphs(), Pretend() as mode:
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
        # a CUDA build of torch, whose optimizers ask for the stream
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
        precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
        try:
            yield mode
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
