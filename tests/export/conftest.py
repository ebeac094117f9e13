"""Nothing here runs where a package of the ONNX export is missing."""

from importlib.util import find_spec

collect_ignore_glob = [] if all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))) else ["*"]
