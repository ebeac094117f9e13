"""The same fake quantization by other libraries, called by the ways that their users take. One file per library."""

from . import brevitas, modelopt, torchao
from .call import Call, Peer

PEERS: tuple[Peer, ...] = (modelopt.PEER, torchao.PEER, brevitas.PEER)
CALLS: tuple[Call, ...] = modelopt.CALLS + torchao.CALLS + brevitas.CALLS
