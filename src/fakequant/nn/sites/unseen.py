"""Functions whose calls belong to no owner of sites: those of a cache of keys and values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

from fakequant.nn.sites.sites import pause, resume


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls are hidden from the owner of sites that calls it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer = pause()
        if outer is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            resume(outer)

    return call


def _of_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    hidden = unseen(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hidden(*args, **kwargs)

    return call


OF_CACHE: CodeType = _of_cache(unseen).__code__  # type: ignore[attr-defined]
"""The code of what `hide_caches` puts in place, by which a recorded run knows the calls of a cache."""


def hide_caches() -> None:
    """Have no owner count what the caches of transformers call, where transformers is imported.

    A cache concatenates or copies as its kind and its length want. `generate` writes to a cache, and the example of
    `prepare` may have none, so that these calls would come in another order than planned. The results of
    transformers stay as they are.
    """
    caches: Any = sys.modules.get("transformers.cache_utils")
    if caches is not None and getattr(caches.Cache.update, "__code__", None) is not OF_CACHE:
        caches.Cache.update = _of_cache(caches.Cache.update)
