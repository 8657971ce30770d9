"""A simulated GPU: tensors that say they are on cuda:0, but compute on the CPU, and may not be mixed with CPU tensors.

Without a GPU, nothing else notices that an operation mixes devices, or that a step recorded as a CUDA graph needs the
CPU. Not simulated: operations inside of torch's C++, differences between CUDA's autocast and the CPU's, tolist() and
the like in a recording, and speed.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda:0")
# operations that may mix devices: they copy between them, or take indices from the CPU
MAY_MIX = {"to", "copy_", "__getitem__", "__setitem__", "__set__", "__deepcopy__", "type_as"}


def is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


class Pretend(TorchFunctionMode):
    """Marks tensors that would be on the GPU; an operation that mixes them with others raises RuntimeError."""

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
                out = out.clone()  # a move makes a new tensor
            return self.mark(out) if will else out
        if is_cuda(target):
            kwargs["device"] = torch.device("cpu")
            return self.mark(func(*args, **kwargs))
        indexed = name in ("__getitem__", "__setitem__") and not pretends(args[0])  # a CPU tensor, by GPU indices
        if here and (name not in MAY_MIX or indexed):
            strangers = [x for x in tensors if not pretends(x) and x.dim() > 0]
            if strangers:
                shapes = [tuple(x.shape) for x in (here[0], strangers[0])]
                raise RuntimeError(f"{full}: tensors on two devices, cuda:0 {shapes[0]} and cpu {shapes[1]}")
        out = func(*args, **kwargs)
        if name in ("tolist", "item", "numpy"):
            return out
        # what is copied into a tensor, or taken from it, is on that tensor's device
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
                    if old.data_ptr() != new.data_ptr():  # neither a view nor made in place
                        old.copy_(new)


# operations for which the CPU waits for the GPU's results; lift_fresh copies from the CPU
WAITS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "allclose", "bincount"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "histc", "lift_fresh"}


class Recording(TorchDispatchMode):
    """torch.cuda.graph: records operations and undoes what they wrote; those of WAITS raise RuntimeError."""

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
    """Inside, there are CUDA graphs, on any device; yields their class, which counts them."""
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
    """Inside, there is one GPU; yields the mode that watches over it."""
    with pytest.MonkeyPatch.context() as patch, pretended_graphs(), Pretend() as mode:
        move = torch.nn.Module.to

        def to(module, *args, **kwargs):
            where = [x for x in (*args, *kwargs.values()) if isinstance(x, (str, torch.device))]
            if where and is_cuda(where[0]):
                mode.mark([*module.parameters(), *module.buffers()])
                return module
            return move(module, *args, **kwargs)

        patch.setattr(torch.nn.Module, "to", to)
        autocast = torch.autocast  # the CPU's computes in bfloat16 too
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
