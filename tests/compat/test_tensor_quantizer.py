"""TensorQuantizer of the pytorch_quantization interface: stages, properties, errors, compilers; ranges of blocks,
calibrated, learned and stored.
"""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.compat.pytorch_quantization.nn import Clip, functional
from fakequant.compat.pytorch_quantization.tensor_quant import fake_tensor_quant, scaled_e4m3, tensor_quant
from tests.support.bits import assert_same_bits
from tests.support.compat_quantizers import X, quantizer


class TestValues:
    def test_a_dynamic_range_is_that_of_the_tensor(self):
        assert_same_bits(quantizer()(X), fake_tensor_quant(X, X.abs().max(), 8, False, False))

    @pytest.mark.parametrize(("axis", "reduced"), [(0, (1, 2)), (-1, (0, 1)), ((0, -1), (1,)), ((0, 1, 2), ())])
    def test_axes_keep_their_own_range(self, axis, reduced):
        amax = X.abs().amax(reduced, keepdim=True) if reduced else X.abs()
        assert_same_bits(quantizer(axis=axis)(X), fake_tensor_quant(X, amax, 8, False, False))

    def test_a_stored_range_and_what_lies_beyond_it(self):
        x = torch.tensor([0.2, 1.0, 5.0, -5.0])
        # The lowest code is -128 unless the range is narrow.
        lowest = -128 / torch.tensor(127.0)
        assert_same_bits(quantizer(amax=1.0)(x), torch.tensor([25 / 127, 1.0, 1.0, lowest]))
        assert_same_bits(quantizer(amax=1.0, narrow_range=True)(x), torch.tensor([25 / 127, 1.0, 1.0, -1.0]))

    def test_scale_amax_multiplies_on_every_use(self):
        q = quantizer(amax=1.0, scale_amax=0.5)
        assert_same_bits(q(X), fake_tensor_quant(X, torch.tensor(0.5), 8, False, False))
        assert q.amax.item() == 1.0
        assert_same_bits(quantizer(scale_amax=0.5)(X), fake_tensor_quant(X, X.abs().max() * 0.5, 8, False, False))

    def test_real_quantization_gives_codes_and_a_scale(self):
        q = quantizer(fake_quant=False, axis=0, unsigned=True, num_bits=4)
        x = X.abs()
        codes, scale = tensor_quant(x, x.amax((1, 2), keepdim=True), 4, True)
        assert_same_bits(q(x), codes)
        assert_same_bits(q.scale, scale)
        wide, narrow = quantizer(fake_quant=False, amax=1.0), quantizer(fake_quant=False, amax=1.0, narrow_range=True)
        assert (wide(torch.tensor(-2.0)).item(), narrow(torch.tensor(-2.0)).item()) == (-128, -127)

    def test_floats(self):
        assert_same_bits(quantizer(num_bits=(4, 3))(X), scaled_e4m3(X, X.abs().max()))
        assert_same_bits(quantizer(num_bits=(4, 3), amax=1.0)(X), scaled_e4m3(X, torch.tensor(1.0)))
        # amax 6 maps every value of E2M1 to itself.
        x = torch.tensor([0.5, 1.2, 2.6, -7.0])
        assert quantizer(num_bits=(2, 1), amax=6.0)(x).tolist() == [0.5, 1.0, 3.0, -6.0]

    @pytest.mark.parametrize("amax", [None, 1.0, 3.3])
    def test_e5m2_is_the_cast_to_float8_e5m2_under_the_scale(self, amax):
        x = torch.cat([X.flatten(), torch.tensor([0.0, -0.0, 1e-6, 2.0**-25, 100.0, -100.0])]).requires_grad_()
        largest = x.detach().abs().max() if amax is None else torch.tensor(amax)
        q = quantizer(num_bits=(5, 2), amax=amax)
        assert q.maxbound == 57344.0
        # The bound times the reciprocal: two roundings, as in E4M3. The cast saturates at the bound.
        scale = 57344.0 * largest.reciprocal()
        expected = (x.detach() * scale).clamp(-57344.0, 57344.0).to(torch.float8_e5m2).float() / scale
        y = q(x)
        assert_same_bits(y, torch.where(x.detach().abs() < 2.0**-24, 0.0, expected))
        y.sum().backward()
        assert_same_bits(x.grad, (x.detach().abs() <= largest).float())

    def test_e5m2_is_calibrated_to_the_largest_magnitude(self):
        q = quantizer(num_bits=(5, 2), axis=0)
        q.disable_quant()
        q.enable_calib()
        q(X)
        q(X / 2)
        q.load_calib_amax()
        assert_same_bits(q.amax, X.abs().amax((1, 2), keepdim=True))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_dtypes_keep_theirs_and_a_float32_amax(self, dtype):
        x = X.to(dtype)
        q = quantizer(axis=0)
        assert_same_bits(q(x), fake_tensor_quant(x, x.abs().amax((1, 2), keepdim=True), 8, False, False))
        q.amax = X.abs().amax((1, 2), keepdim=True)
        q.to(dtype)
        assert q.amax.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert q(x).dtype == dtype

    def test_nan_costs_a_calibrated_tensor_one_element(self):
        x = torch.tensor([0.5, float("nan"), float("inf"), -float("inf")])
        assert_same_bits(quantizer(amax=1.0, narrow_range=True)(x), torch.tensor([64 / 127, float("nan"), 1.0, -1.0]))

    def test_an_empty_tensor_with_a_known_range(self):
        assert quantizer(amax=1.0)(torch.empty(0, 3)).shape == (0, 3)
        with pytest.raises(RuntimeError):
            quantizer()(torch.empty(0, 3))


class TestStages:
    def test_disabled_returns_the_very_tensor(self):
        q = quantizer(disabled=True, if_calib=True)
        assert q(X) is X
        assert q._calibrator.compute_amax() is None
        q.enable()
        assert q(X) is not X
        q.disable()
        assert q(X) is X

    def test_pre_quant_scale_comes_first_and_also_when_disabled(self):
        q = quantizer(amax=1.0)
        q.pre_quant_scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        scaled = X * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        assert_same_bits(q(X), fake_tensor_quant(scaled, torch.tensor(1.0), 8, False, False))
        q.disable()
        assert_same_bits(q(X), scaled)
        assert q(X.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="Changing shape"):
            q.pre_quant_scale = torch.tensor(1.0)

    def test_calibration_sees_the_tensor_before_it_is_quantized(self):
        q = quantizer(amax=0.1, if_calib=True)
        q(X)
        assert q._calibrator.compute_amax() == X.abs().max()
        q.disable_calib()
        q(100 * X)
        assert q._calibrator.compute_amax() == X.abs().max()

    def test_quantization_can_be_off(self):
        q = quantizer()
        q.disable_quant()
        assert q(X) is X
        q.enable_quant()
        assert q(X) is not X

    def test_clip_alone_clips(self):
        q = quantizer(learn_amax=True, amax=0.5)
        q.disable_quant()
        assert_same_bits(q(X), X.clamp(-0.5, 0.5))
        q.disable_clip()
        assert q(X) is X

    def test_a_clip_stage_without_a_learned_range_raises(self):
        with pytest.raises(ValueError, match="learn_amax"):
            quantizer(if_clip=True)
        q = quantizer()
        with pytest.raises(ValueError, match="learn_amax"):
            q.enable_clip()
        with pytest.raises(AttributeError):
            q.disable_clip()
        q._if_clip = True
        with pytest.raises(RuntimeError, match="learn_amax"):
            q(X)

    def test_calibration_without_a_calibrator_raises(self):
        q = quantizer()
        q._calibrator = None
        with pytest.raises(ValueError, match="no calibrator"):
            q.enable_calib()
        q._if_calib = True
        with pytest.raises(RuntimeError, match="Calibrator"):
            q(X)
        unknown = quantizer(calib_method="abc")
        assert repr(unknown) == "TensorQuantizer(8bit fake per-tensor amax=dynamic scale=1.0 quant)"
        with pytest.raises(AttributeError, match="_calibrator"):
            unknown.enable_calib()
        with pytest.raises(RuntimeError, match="Calibrator not created"):
            unknown.load_calib_amax()


class TestProperties:
    def test_of_a_descriptor(self):
        q = quantizer(num_bits=4, axis=1, unsigned=True, narrow_range=True)
        assert (q.num_bits, q.axis, q.unsigned, q.narrow_range, q.fake_quant) == (4, 1, True, True, True)
        assert (q.amax, q.pre_quant_scale, q.maxbound) == (None, None, 15)
        q.num_bits, q.unsigned, q.narrow_range = 8, False, False
        assert (q.num_bits, q.unsigned, q.narrow_range, q.maxbound) == (8, False, False, 127)
        q.num_bits = (4, 3)
        assert q.maxbound == 448.0

    def test_scale(self, caplog):
        assert quantizer().scale == 1.0
        assert "amax or step_size" in caplog.text
        caplog.clear()
        assert quantizer(fake_quant=False).scale is None
        assert "no tensor was quantized yet" in caplog.text

    def test_step_size(self, caplog):
        assert_same_bits(quantizer(amax=2.0, num_bits=4).step_size, torch.tensor(2.0) / 7)
        assert quantizer().step_size is None
        assert "no single step_size" in caplog.text
        with pytest.raises(TypeError, match="float format"):
            _ = quantizer(num_bits=(4, 3), amax=1.0).step_size

    def test_amax_is_a_buffer_that_is_there_when_it_is_set(self):
        q = quantizer(axis=0)
        assert not hasattr(q, "_amax")
        assert not q.state_dict()
        given = torch.tensor([[1.0], [2.0]])
        q.amax = given
        given.fill_(9.0)
        assert q.amax.tolist() == [[1.0], [2.0]]
        kept = q.amax
        q.amax = [[3.0], [4.0]]
        assert kept.tolist() == [[3.0], [4.0]]
        for wrong in (1.0, [1.0, 2.0]):
            with pytest.raises(RuntimeError, match="Changing shape"):
                q.amax = wrong
        q.amax = None
        assert q.amax is kept
        del q._amax
        assert q.amax is None
        q.amax = 1.0
        assert q.amax.shape == ()

    @pytest.mark.parametrize("amax", [1.5, [1.5], [[1.0], [2.0]]])
    def test_amax_of_a_descriptor(self, amax):
        assert_same_bits(quantizer(amax=amax).amax, torch.tensor(amax))


class TestPrinting:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({}, "8bit fake per-tensor amax=dynamic calibrator=MaxCalibrator scale=1.0 quant"),
            ({"disabled": True}, "disabled"),
            (
                {"num_bits": 4, "unsigned": True, "axis": (0, 1), "narrow_range": True, "calib_method": "histogram"},
                None,
            ),
            (
                {"axis": 0, "amax": [1.0, 2.5], "scale_amax": 0.5, "if_calib": True, "fake_quant": False},
                "8bit axis=0 amax=[1.0000, 2.5000](2) *0.5 calibrator=MaxCalibrator quant calib",
            ),
            ({"num_bits": (4, 3), "amax": 1.0}, "(4, 3)bit fake per-tensor amax=1.0000 calibrator=MaxCalibrator"),
        ],
    )
    def test_form(self, options, text):
        if text is None:
            with pytest.raises(NotImplementedError, match="per tensor"):
                quantizer(**options)
        elif text.endswith("MaxCalibrator"):
            assert repr(quantizer(**options)) == f"TensorQuantizer({text} scale=1.0 quant)"
        else:
            assert repr(quantizer(**options)) == f"TensorQuantizer({text})"

    def test_of_other_states(self):
        q = quantizer(learn_amax=True)
        q.pre_quant_scale = 2.0
        assert q.extra_repr() == (
            "8bit fake per-tensor amax=dynamic pre_quant_scale learned calibrator=MaxCalibrator scale=1.0 quant clip"
        )
        q.disable_quant()
        q._calibrator = None
        assert q.extra_repr() == "8bit fake per-tensor amax=dynamic pre_quant_scale learned scale=1.0 clip"


class TestTorchFeatures:
    CASES = pytest.mark.parametrize(
        "options",
        [
            {},
            {"amax": 1.0},
            {"axis": 0},
            {"num_bits": (4, 3), "amax": 1.0},
            {"amax": 1e-9},
            {"block_sizes": {-1: 5}},
            {"unsigned": True},
        ],
        ids=str,
    )

    @CASES
    def test_compiled_in_one_graph(self, options):
        q = quantizer(**options)
        x = X.abs().requires_grad_()
        y = x.detach().clone().requires_grad_()
        compiled = torch.compile(q, fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(x), q(y))
        compiled(x).sin().sum().backward()
        q(y).sin().sum().backward()
        assert_same_bits(x.grad, y.grad)

    @CASES
    def test_exported(self, options):
        q = quantizer(**options)
        program = torch.export.export(q, (X.abs(),))
        for x in (X.abs(), 3 * X.abs()):
            assert_same_bits(program.module()(x), q(x))

    @CASES
    def test_mapped(self, options):
        q = quantizer(**options)
        x = X.abs()[None].expand(2, *X.shape)
        assert_same_bits(torch.func.vmap(q)(x), torch.stack([q(each) for each in x]))

    def test_compiled_while_it_learns(self):
        q = quantizer(learn_amax=True, amax=0.5)
        torch.compile(q, fullgraph=True, backend="aot_eager")(X).sum().backward()
        found = [p.grad.clone() for p in q.parameters()]
        q.zero_grad()
        q(X).sum().backward()
        for a, b in zip(found, q.parameters(), strict=True):
            assert_same_bits(a, b.grad)

    def test_under_autocast(self):
        layer = torch.nn.Linear(5, 3)
        q = quantizer()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden: Tensor = layer(X)
            assert q(hidden).dtype == torch.bfloat16
            assert layer(q(X)).dtype == torch.bfloat16


class TestBlocks:
    @pytest.mark.parametrize(
        ("num_bits", "sizes", "spec"),
        [
            (4, {-1: 16}, "int4 per_block(-1:16,pad) multiplier"),
            ((4, 3), {0: 8, 1: 8}, "float8_e4m3fn per_block(0:8,1:8,pad) multiplier"),
            (
                (2, 1),
                {-1: 16, "scale_bits": (4, 3)},
                "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor",
            ),
            ((2, 1), {-1: 32, "scale_bits": (8, 0)}, "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:ceil"),
            (
                4,
                {-1: 8, "scale_bits": 8, "scale_block_sizes": {-1: 32}},
                "int4 per_block(-1:8,pad) scale=uint8@per_block(-1:32,pad)",
            ),
        ],
        ids=str,
    )
    def test_dynamic_blocks_are_the_cores(self, num_bits, sizes, spec):
        x = torch.randn(3, 40)
        q = quantizer(num_bits=num_bits, block_sizes={**sizes, "type": "dynamic"})
        assert_same_bits(q(x), fq.fake_quantize(x, spec))
        q.amax = 1.0
        assert_same_bits(q(x), fq.fake_quantize(x, spec))

    def test_static_blocks_are_calibrated(self):
        q = quantizer(num_bits=4, block_sizes={0: 2, -1: 16}, if_calib=True)
        batches = torch.randn(3, 5, 40).unbind()
        q.disable_quant()
        for batch in batches:
            assert q(batch) is batch
        q.load_calib_amax()
        q.enable_quant()
        expected = torch.zeros(3, 3)
        for batch in batches:
            padded = torch.nn.functional.pad(batch, (0, 8, 0, 1)).abs()
            expected = torch.maximum(expected, padded.view(3, 2, 3, 16).amax((1, 3)))
        assert_same_bits(q.amax, expected)
        spec = "int4 per_block(0:2,-1:16,pad) multiplier"
        assert_same_bits(q(batches[0]), fq.fake_quantize(batches[0], spec, amax=expected))
        assert "block_sizes={0: 2, -1: 16} amax=[" in repr(q)

    def test_one_block_keeps_its_axes(self):
        q = quantizer(block_sizes={-1: 8}, if_calib=True)
        q(torch.ones(1, 8))
        q.load_calib_amax()
        assert q.amax.shape == (1, 1)
        assert_same_bits(q(torch.ones(1, 8)), torch.ones(1, 8))

    def test_a_histogram_has_no_blocks(self):
        with pytest.raises(NotImplementedError, match="calib_method='max'"):
            quantizer(block_sizes={-1: 8}, calib_method="histogram", if_calib=True)(torch.ones(1, 8))


class TestCalibration:
    def test_the_loaded_amax_is_a_copy(self):
        q = quantizer(if_calib=True)
        q(torch.tensor([1.0]))
        q.load_calib_amax()
        q(torch.tensor([9.0]))
        assert q.amax.item() == 1.0
        kept = q.amax
        q.load_calib_amax()
        assert q.amax is kept
        assert kept.item() == 9.0

    def test_by_histogram(self):
        q = quantizer(calib_method="histogram", if_calib=True)
        q(X)
        q.load_calib_amax("percentile", percentile=99.0)
        assert_same_bits(q.amax, q._calibrator.compute_amax("percentile", percentile=99.0))
        for wrong in ((), ("median",)):
            with pytest.raises(TypeError):
                q.load_calib_amax(*wrong)
        per_max = quantizer(if_calib=True)
        per_max(X)
        with pytest.raises(TypeError):
            per_max.load_calib_amax("mse")

    def test_nothing_collected(self, caplog):
        for method, args in (("max", ()), ("histogram", ("entropy",))):
            q = quantizer(calib_method=method)
            with pytest.raises(RuntimeError, match="Calibrator returned None"):
                q.load_calib_amax(*args)
            assert q.amax is None
            q.load_calib_amax(*args, strict=False)
            assert q.amax.isnan()
            assert "becomes NaN" in caplog.text

    def test_a_range_of_another_shape_replaces_the_one_that_is_there(self):
        q = quantizer(axis=0, amax=1.0, if_calib=True)
        q(X)
        q.load_calib_amax()
        assert_same_bits(q.amax, X.abs().amax((1, 2), keepdim=True))


class TestLearning:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "ends",
        [(-1.0, 2.0), (0.0, 6.0), (1.0, 2.0), (2.0, 1.0), (-3.0, -2.0), (-0.0, 0.0), (-1e-42, 1e-42)],
        ids=str,
    )
    def test_clip_equals_the_formula_of_pact(self, dtype, ends):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(1000, 3, generator=generator).to(dtype)
        beside = (math.nextafter(end, towards) for end, towards in itertools.product(ends, (-math.inf, math.inf)))
        x[:11, 0] = torch.tensor([*ends, *beside, 0.0, -0.0, math.inf, -math.inf, math.nan]).to(dtype)
        dy = torch.randn(3, 1000, generator=generator).to(dtype)
        low, high = (torch.tensor(end, requires_grad=True) for end in ends)
        # Transposed, so that rows are not contiguous.
        x = x.t().requires_grad_()
        y = functional.clip(x, low, high)
        y.backward(dy)
        given = x.detach()
        lowest, highest = low.detach(), high.detach()
        assert_same_bits(y, torch.max(torch.min(given, highest.to(dtype)), lowest.to(dtype)))
        assert_same_bits(x.grad, torch.where((given > lowest) & (given < highest), dy, 0.0))
        for bound, reached in ((low, given <= lowest), (high, given >= highest)):
            assert_same_bits(bound.grad, torch.tensor(math.fsum(dy[reached].tolist())))

    def test_the_gradient_of_a_bound_is_the_same_for_every_number_of_threads_and_layout(self):
        generator = torch.Generator().manual_seed(4)
        x, dy = torch.randn(2, 1024, 300, generator=generator)
        dy *= 10.0 ** torch.arange(-10, 10).repeat(15)
        expected = torch.tensor(math.fsum(dy[x >= 0.5].tolist()))
        threads = torch.get_num_threads()
        for count, transposed in itertools.product((1, 3), (False, True)):
            high = torch.tensor(0.5, requires_grad=True)
            torch.set_num_threads(count)
            try:
                functional.clip(x.t() if transposed else x, torch.tensor(-0.5), high).backward(
                    dy.t() if transposed else dy
                )
            finally:
                torch.set_num_threads(threads)
            assert_same_bits(high.grad, expected)

    def test_clip_of_several_bounds_has_no_gradient(self):
        x = torch.ones(2, requires_grad=True)
        y = functional.clip(x, torch.tensor([-1.0, -1.0]), torch.tensor([0.5, 2.0]))
        assert y.tolist() == [0.5, 1.0]
        with pytest.raises(ValueError, match="can only be scalar"):
            y.sum().backward()
        Clip([-1.0, -1.0], [0.5, 2.0])(x.detach())

    @pytest.mark.parametrize("learned", [False, True])
    @pytest.mark.parametrize("bound", ["1.0", None, {}, object(), 1j, torch.tensor(1j), [[1.0], [1.0, 2.0]]])
    def test_a_bound_that_is_no_number_is_refused(self, bound, learned):
        with pytest.raises(TypeError, match=r"clip_value_min must be a number, or a tensor .* got"):
            Clip(bound, 2.0, learn_min=learned)
        with pytest.raises(TypeError, match=r"clip_value_max must be a number, or a tensor .* got"):
            Clip(-1.0, bound, learn_max=learned)

    @pytest.mark.parametrize(
        "bound", [torch.tensor(2.0), torch.ones(2), torch.nn.Parameter(torch.tensor(2.0)), [0.5, 2.0]]
    )
    def test_a_learned_bound_is_one_number_and_no_tensor(self, bound):
        for learned in ("min", "max"):
            with pytest.raises(ValueError, match=rf"must be scalar for .* clip_value_{learned} is "):
                Clip(bound, bound, **{f"learn_{learned}": True})

    @pytest.mark.parametrize(
        ("bound", "learned"),
        [*((bound, learned) for bound in (2, 2.0, np.float32(2.0), np.array(2.0)) for learned in (False, True)),
         (torch.tensor(2.0), False)],
    )  # fmt: skip
    def test_a_bound_is_copied(self, bound, learned):
        clip = Clip(-1.0, bound, learn_max=learned)
        assert clip(torch.tensor([-5.0, 0.5, 5.0])).tolist() == [-1.0, 0.5, 2.0]
        assert clip.clip_value_max is not bound
        assert clip.clip_value_max.dtype == torch.float32

    def test_a_bound_that_is_a_parameter_stays_that_parameter(self):
        bound = torch.nn.Parameter(torch.tensor(2.0))
        clip = Clip(-1.0, bound)
        assert next(clip.parameters()) is bound
        clip(torch.tensor([0.5, 3.0, 4.0])).sum().backward()
        assert bound.grad.item() == 2.0

    def test_learned_bounds_are_parameters_and_fixed_ones_buffers(self):
        clip = Clip(-1.0, 2.0, learn_max=True)
        assert [name for name, _ in clip.named_parameters()] == ["clip_value_max"]
        assert [name for name, _ in clip.named_buffers()] == ["clip_value_min"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_range_learns_from_what_it_clips(self, dtype):
        q = quantizer(learn_amax=True, amax=0.3).to(dtype)
        x = torch.tensor([-1.0, 0.1, 0.2, 4.0], dtype=dtype, requires_grad=True)
        y = q(x)
        assert_same_bits(y, fake_tensor_quant(x.detach().clamp(-0.3, 0.3), torch.tensor(0.3), 8, False, False))
        y.backward(torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=dtype))
        assert x.grad.tolist() == [0.0, 2.0, 4.0, 0.0]
        assert (q.clip.clip_value_min.grad.item(), q.clip.clip_value_max.grad.item()) == (1.0, 8.0)
        assert q.clip.clip_value_max.dtype == torch.float32

    def test_the_farther_bound_is_amax(self):
        q = quantizer(learn_amax=True)
        assert (q.clip.clip_value_min.item(), q.clip.clip_value_max.item()) == (-1.0, 1.0)
        with torch.no_grad():
            q.clip.clip_value_max.fill_(0.25)
        x = torch.tensor([-2.0, 2.0])
        expected = fake_tensor_quant(torch.tensor([-1.0, 0.25]), torch.tensor(1.0), 8, False, False)
        assert_same_bits(q(x), expected)

    def test_starting_from_a_calibrated_range(self):
        q = quantizer(learn_amax=True)
        with pytest.raises(AttributeError):
            q.init_learn_amax()
        q.amax = [[1.0], [2.5]]
        q.init_learn_amax()
        assert (q.clip.clip_value_min.item(), q.clip.clip_value_max.item()) == (-2.5, 2.5)
        with pytest.raises(RuntimeError, match="learn_amax"):
            quantizer().init_learn_amax()

    def test_learning_can_be_switched_off_and_on(self):
        q = quantizer(learn_amax=True)
        q.disable_clip()
        assert not any(p.requires_grad for p in q.parameters())
        q.enable_clip()
        assert all(p.requires_grad for p in q.parameters())

    def test_errors(self):
        with pytest.raises(ValueError, match="must be scalar"):
            quantizer(learn_amax=True, amax=[1.0, 2.0])
        with pytest.raises(TypeError):
            quantizer(learn_amax=True, axis=0)


class TestState:
    def test_a_state_with_ranges_loads_into_a_quantizer_without(self):
        given = quantizer(axis=0, amax=[[1.0], [2.0]])
        given.pre_quant_scale = 2.0
        state = given.state_dict()
        assert set(state) == {"_amax", "_pre_quant_scale"}
        q = quantizer(axis=0)
        q.load_state_dict(state)
        assert_same_bits(q.amax, given.amax)
        assert_same_bits(q.pre_quant_scale, given.pre_quant_scale)
        other_shape = quantizer(amax=5.0)
        other_shape.load_state_dict(state)
        assert_same_bits(other_shape.amax, given.amax)

    def test_a_state_without_a_range_does_not_load_into_a_quantizer_with_one(self):
        with pytest.raises(RuntimeError, match="_amax"):
            quantizer(amax=1.0).load_state_dict({})

    def test_copies_pickles_and_models_pickled_by_the_original(self):
        q = quantizer(amax=1.0, calib_method="histogram")
        for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
            assert_same_bits(other(X), q(X))
            assert repr(other) == repr(q)
        older = copy.deepcopy(q)
        for name in ("_dynamic", "_blocks"):
            del older.__dict__[name]
        assert_same_bits(older(X), q(X))
