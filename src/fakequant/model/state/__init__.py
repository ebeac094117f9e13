"""A quantized model as data, and as files."""

from fakequant.model.state.applying import apply as apply
from fakequant.model.state.applying import check_plan as check_plan
from fakequant.model.state.applying import finish_loading as finish_loading
from fakequant.model.state.applying import restore_plan as restore_plan
from fakequant.model.state.checkpoint import load as load
from fakequant.model.state.checkpoint import save as save
from fakequant.model.state.placing import float_state_dict as float_state_dict
from fakequant.model.state.snapshots import LazyTensor as LazyTensor
from fakequant.model.state.snapshots import QuantizedState as QuantizedState
from fakequant.model.state.snapshots import register_codec as register_codec
from fakequant.model.state.snapshots import snapshot as snapshot
from fakequant.model.state.weight_codes import WeightCodes as WeightCodes
