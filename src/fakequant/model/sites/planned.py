"""Calls of functions and the quantizers planned for them: see `sites.plan_sites`."""

from __future__ import annotations

from dataclasses import dataclass, field

from fakequant.model.config import TensorConfig
from fakequant.nn.backward.products import GradientConfig
from fakequant.nn.quantizer import Kind
from fakequant.nn.sites.sites import SITES, site_key
from fakequant.text import table


@dataclass(frozen=True)
class SiteQuantizer:
    """One quantizer of a site.

    Attributes:
        tensor: how it quantizes.
        kind: whether the operand is computed from the model's input, or from parameters alone.
        group: the path of the quantizer that it is, where several share one; None for one of its own.
        fixed: scale and zero point that nothing moves; None where calibration finds them.
    """

    tensor: TensorConfig
    kind: Kind = Kind.INPUT
    group: str | None = None
    fixed: tuple[float, int] | None = None

    def __str__(self) -> str:
        text = str(self.tensor)
        if self.fixed is not None:
            text += f" with scale {self.fixed[0]:.6g} and zero point {self.fixed[1]}"
        return text if self.group is None else f"{text} shared as {self.group}"


@dataclass(frozen=True)
class PlannedSite:
    """One call of a function and the quantizers of its operands.

    Attributes:
        owner: the path of the module whose `forward` calls the function.
        function: its canonical name.
        index: how many calls of it come before in the same `forward`.
        operands: the arguments that are float tensors.
        quantizers: by operand.
        weights: the operands that are parameters which this call alone reads, with their paths in the owner.
        gradient: how the products of its backward pass are quantized; None leaves them in float.
    """

    owner: str
    function: str
    index: int
    operands: tuple[str, ...]
    quantizers: dict[str, SiteQuantizer]
    weights: dict[str, str] = field(default_factory=dict)
    gradient: GradientConfig | None = None

    @property
    def key(self) -> str:
        """The name of the site in its owner."""
        return site_key(self.function, self.index)

    @property
    def path(self) -> str:
        """The path of the site in the model."""
        return site_path(self.owner, self.key)


@dataclass(frozen=True)
class SitePlan:
    """The sites of a model; prints as a table.

    Attributes:
        sites: in the order of the run.
        steps: for every owner the functions that have sites in it, in the order of all their calls in one `forward`.
        shielded: the modules that owners call, whose own calls are not theirs.
        training_keys: the calls in training mode, of the owners in which they are others: see `Sites`.
    """

    sites: tuple[PlannedSite, ...] = ()
    steps: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shielded: tuple[str, ...] = ()
    training_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for site in self.sites:
            held = ", ".join(f"{name} {quantizer}" for name, quantizer in site.quantizers.items())
            lines.append(f"{site.path}: {held}")
        return table([[line] for line in lines]) or "no functions have quantizers"

    __repr__ = __str__  # what notebooks and consoles show


def site_path(owner: str, key: str) -> str:
    """The path of a site in a model.

    >>> site_path("blocks.0", "add_1")
    'blocks.0._sites.add_1'
    """
    return f"{owner}.{SITES}.{key}" if owner else f"{SITES}.{key}"


@dataclass(frozen=True)
class Candidate:
    """A call that could be a site, from all visits of its owner."""

    owner: str
    function: str
    index: int
    operands: tuple[str, ...]
    constants: frozenset[str]
    """The operands that are parameters, or computed from parameters alone."""
    equation: str = ""
    """The equation of the `Call`."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Those of the operands in the first call."""

    @property
    def path(self) -> str:
        """The path that its site would have."""
        return site_path(self.owner, site_key(self.function, self.index))

    def shape(self, operand: str) -> tuple[int, ...]:
        """The shape of an operand; () of one that the call does not have."""
        return dict(zip(self.operands, self.shapes, strict=True)).get(operand, ())
