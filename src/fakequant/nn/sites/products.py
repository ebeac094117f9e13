"""The weights that functions read in a `forward`, and how rows of inputs are multiplied with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fakequant.nn.functions import SITE_FUNCTIONS
from fakequant.nn.paths import layer_of, module_at
from fakequant.nn.products import MatrixProduct, Product, TransposedWindowProduct, TurnedProduct, WindowProduct
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.sites.sites import SITES, sites_of

_FIRST_OPTION = 3  # of a convolution, after input, weight and bias


class SiteProduct(Product):
    """A weight of a function; of one that is no product with a matrix, unless a subclass says how it multiplies."""

    @property
    def kind(self) -> str:
        return f"call of {self.layer.function}"

    @property
    def channels(self) -> int:
        operands = SITE_FUNCTIONS[self.layer.function].operands
        return next((own.channels for own in operands if own.name == self.attribute), 0)

    def row_name(self, path: str) -> str:
        return layer_of(path) if len(self.layer.weights) == 1 else path


class _Linear(SiteProduct, MatrixProduct):
    """Rows of an operand of a function multiplied with its other operand, a weight [out, in]."""

    readers = 0
    is_result = False
    varies = False
    """Whether calls have other options than the first one: its rows are not those of the others."""
    _bias: nn.Parameter | None = None
    _options: tuple[Any, ...] | None = None

    @property
    def is_matrix(self) -> bool:
        return self.tensor.dim() == 2 and len(self.layer.weights) == 1 and not self.varies

    @property
    def kind(self) -> str:
        if self.varies:
            return f"{super().kind} whose options vary"
        return super().kind if len(self.layer.weights) == 1 else f"{super().kind} of two weights"

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return self._bias, slice(None)

    @property
    def input_transform(self) -> None:
        return None

    @property
    def _input(self) -> str:
        return next(name for name in self.layer.operands if name != self.attribute)

    @property
    def input_quantizer(self) -> Quantizer | None:
        return self.layer._modules.get(self._input)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        def see(operands: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            self.note(args, kwargs)
            hook(self, (operands[self._input],), {})

        return self.layer.watch(see)

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what else a call gets."""
        bias = self.added(args, kwargs)
        self._bias = bias if isinstance(bias, nn.Parameter) else None
        self.why_no_bias = None if self._bias is bias else "it is no parameter"
        options = (self._bias, *self.options(args, kwargs).items())
        self.varies = self.varies or self._options not in (None, options)
        self._options = options

    def added(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The bias of a call; None without a bias."""
        return args[2] if len(args) > 2 else kwargs.get("bias")

    def options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by which it makes rows."""
        return {}

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        quantizer = self.input_quantizer
        return tuple(inputs) if quantizer is None else (quantizer(inputs[0]),)


class _MatMul(_Linear, TurnedProduct):
    """input @ weight, with a weight [in, out]; `addmm` adds a bias, or that times a number."""

    def added(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.layer.function != "addmm":
            return None
        bias = args[0] if args else kwargs.get("input")
        factors = (*args[3:], *(kwargs[name] for name in ("beta", "alpha") if name in kwargs))
        return bias if all(factor == 1 for factor in factors) else (bias, *factors)


class _LeftMatMul(_Linear):
    """weight @ input, with a weight [out, in]: the columns of the input are the rows."""

    added = _MatMul.added

    def with_axis(self, x: Tensor) -> Tensor:
        return x[:, None] if x.dim() == 1 else x

    def rows(self, x: Tensor) -> Tensor:
        return super().rows(self.with_axis(x).mT)

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight @ x

    def channels_last(self, y: Tensor) -> Tensor:
        return y.mT


class _Convolution(_Linear, WindowProduct):
    """A convolution by a function, whose calls say how windows lie in the input."""

    forms: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = ("stride", "padding", "dilation", "groups")
    _geometry: Any = None

    @property
    def is_matrix(self) -> bool:
        return len(self.layer.weights) == 1 and not self.varies

    @property
    def geometry(self) -> Any:
        return self._geometry

    def options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(zip(self.names, args[_FIRST_OPTION:], strict=False))
        return given | {name: kwargs[name] for name in self.names if name in kwargs}

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().note(args, kwargs)
        given = self.options(args, kwargs)
        first, second, *kernel = self.tensor.shape
        channels = self.in_and_out(first, second, given.get("groups", 1))
        form = self.forms[len(kernel) - 1]
        self._geometry = form(*channels, tuple(kernel), **given, bias=False, device="meta")

    @staticmethod
    def in_and_out(first: int, second: int, groups: int) -> tuple[int, int]:
        """The numbers of input and output channels, by the first two lengths of the weight."""
        return second * groups, first


class _TransposedConvolution(_Convolution, TransposedWindowProduct):
    """A transposed convolution by a function."""

    forms: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    names = ("stride", "padding", "output_padding", "groups", "dilation")

    @property
    def is_matrix(self) -> bool:
        return super().is_matrix and (self._geometry is None or self.groups == 1)

    @property
    def kind(self) -> str:
        with_groups = self._geometry is not None and self.groups > 1
        return f"{super().kind} with groups" if with_groups else super().kind

    @staticmethod
    def in_and_out(first: int, second: int, groups: int) -> tuple[int, int]:
        return first, second * groups


_CLASSES: dict[tuple[str, str], type[Product]] = {
    ("linear", "weight"): _Linear,
    **{(name, "other"): _MatMul for name in ("matmul", "addmm")},
    **{(name, "input"): _LeftMatMul for name in ("matmul", "addmm")},
    **{(f"conv{n}d", "weight"): _Convolution for n in (1, 2, 3)},
    **{(f"conv_transpose{n}d", "weight"): _TransposedConvolution for n in (1, 2, 3)},
}
"""Classes by function and operand; for other weights algorithms keep the nearest values."""
OF_LAYERS = frozenset(function for function, operand in _CLASSES if operand == "weight")
"""The functions that linear layers and convolutions compute."""


def site_products(owner: nn.Module) -> dict[str, Product]:
    """The weights with a quantizer that functions in the `forward` of a module read, by the path of the quantizer."""
    found: dict[str, Product] = {}
    sites = sites_of(owner)
    for key, site in sites.by_key().items() if sites is not None else ():
        for operand, path in site.weights.items():
            if site._modules.get(operand) is not None:
                inner, _, name = path.rpartition(".")
                product = _CLASSES.get((site.function, operand), SiteProduct)
                found[f"{SITES}.{key}.{operand}"] = product(site, operand, module_at(owner, inner), name)
    return found
