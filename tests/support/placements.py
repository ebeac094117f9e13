"""The engines that say where they want quantizers."""

import fakequant as fq

PLACING = sorted({engine.name for engine in fq.known_engines().values() if engine.placement is not None})


def placement_of(name: str) -> fq.Target:
    """The table of an engine."""
    placement = fq.known_engines()[name].placement
    assert placement is not None
    return placement()
