"""The compiler of torch, imported by what compiles alone: 900 modules, a third of a start.

    defer_compiler()         torch's own functions that a graph leaves out run without it
    UnsetWeights()           modules are built without torch's initialisation
    deferred_decorators()    so do a library's, with torch.compile and torch.compiler.disable
    running_eagerly()        compiled blocks run uncompiled; without the compiler there are none

Torch imports it (`torch._dynamo`, with sympy and Inductor) where a function is only exempt from it,
as in the constructor of every optimizer, and to initialise tables on the meta device. As soon as
anything else has imported it, exempt functions behave as torch wrote them.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_COMPILER = "torch._dynamo"
_CACHE = "__dynamo_disable"
"""Attribute in which `torch._disable_dynamo` keeps the exempt form of a function."""


def is_compiler_loaded() -> bool:
    """Returns whether anything has imported the compiler, without which nothing is compiled."""
    return _COMPILER in sys.modules


@functools.cache
def defer_compiler() -> None:
    """Lets optimizers and checkpointed blocks run without the compiler until something compiles."""
    optimizer = torch.optim.Optimizer
    exempt: list[Any] = [optimizer.add_param_group, optimizer.zero_grad, optimizer.state_dict]
    exempt += [optimizer.load_state_dict, torch.utils.checkpoint.checkpoint]
    for function in exempt:
        _defer(function)


class UnsetWeights(TorchFunctionMode):
    """Context in which modules are built on the meta device, and get storage, without initial weights.

    Torch's references of `normal_` and `empty_like`, for the meta device, import the compiler or sympy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leaves out initialisations, and allocates by shape; passes on all other calls."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == torch.nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        if func is torch.empty_like and args[0].is_contiguous():
            same = {"dtype": args[0].dtype, "device": args[0].device}
            return torch.empty(args[0].shape, **{**same, **kwargs})
        return func(*args, **kwargs)


def _defer(exempt: Any) -> None:
    function = exempt.__wrapped__

    def until_loaded(*args: Any, **kwargs: Any) -> Any:
        if not is_compiler_loaded():
            return function(*args, **kwargs)
        delattr(function, _CACHE)
        return exempt(*args, **kwargs)

    if not hasattr(function, _CACHE):
        setattr(function, _CACHE, until_loaded)


@contextlib.contextmanager
def deferred_decorators() -> Iterator[None]:
    """Keeps decorators of a library that is imported or set up from importing the compiler."""
    if is_compiler_loaded():
        yield
        return
    with (
        _replaced(torch, "compile", _when_called),
        _replaced(torch, "_disable_dynamo", _when_loaded),
        _replaced(torch.compiler, "disable", _when_loaded),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, decorator: Callable[..., Any]) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, functools.partial(decorator, before))
    try:
        yield
    finally:
        setattr(module, name, before)


def _when_called(decorate: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    """Compiles a function when it is called first."""
    if function is None:
        return functools.partial(_when_called, decorate, **options)
    decorated = functools.cache(functools.partial(decorate, function, **options))
    return functools.wraps(function)(lambda *args, **kwargs: decorated()(*args, **kwargs))


def _when_loaded(decorate: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    """Exempts a function from a compiler that is there when it is called."""
    if function is None:
        return functools.partial(_when_loaded, decorate, **options)
    decorated = functools.cache(functools.partial(decorate, function, **options))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (decorated() if is_compiler_loaded() else function)(*args, **kwargs)

    return run


def running_eagerly() -> AbstractContextManager[Any]:
    """Runs compiled blocks uncompiled, for inputs whose shapes differ from training."""
    if is_compiler_loaded():
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
