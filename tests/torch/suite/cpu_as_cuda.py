"""Let the suite's single-GPU-per-rank tests run on CPU tensors: every request
for a CUDA (or integer) device gives the CPU, DDP's device_ids are dropped and
the "need N GPUs" decorators do nothing.  Used by torch_suite.py --unlock cpu-as-cuda.
Call early() before the suite is imported, late() after."""

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _dev(x):
    if isinstance(x, bool):
        return x
    if isinstance(x, torch.device):
        return CPU if x.type == "cuda" else x
    if isinstance(x, str) and x.startswith("cuda"):
        return CPU
    if isinstance(x, int):
        return CPU
    return x


class CpuAsCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if kwargs.get("device") is not None:
            kwargs = dict(kwargs, device=_dev(kwargs["device"]))
        if name == "to" and len(args) > 1:
            args = (args[0], _dev(args[1]), *tuple(args[2:]))
        return func(*args, **kwargs)


def early():
    import torch.testing._internal.common_distributed as cd

    def same(*a, **k):
        return lambda f: f

    cd.skip_if_lt_x_gpu = same
    cd.skip_if_no_gpu = lambda f: f

    class device(contextlib.nullcontext):
        def __init__(self, *a):
            super().__init__()

    torch.cuda.set_device = lambda *a, **k: None
    torch.cuda.device = device
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.empty_cache = lambda: None
    cd.init_multigpu_helper = lambda world_size, backend: {i: [i] for i in range(int(world_size))}

    to = torch.nn.Module.to

    @functools.wraps(to)
    def module_to(self, *args, **kwargs):
        args = tuple(_dev(x) for x in args[:1]) + args[1:]
        if "device" in kwargs:
            kwargs["device"] = _dev(kwargs["device"])
        return to(self, *args, **kwargs)

    torch.nn.Module.to = module_to


def late():
    from torch.nn.parallel import DistributedDataParallel as DDP

    init = DDP.__init__

    @functools.wraps(init)
    def __init__(self, module, device_ids=None, output_device=None, *a, **k):
        return init(self, module, None, None, *a, **k)

    DDP.__init__ = __init__
    CpuAsCuda().__enter__()
