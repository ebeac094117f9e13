"""Records what the emulation of HTP in onnxruntime-qnn computes, into qnn.npz.

Run by `python -m tests.vectors.record_qnn` where onnxruntime-qnn 2.7 is installed beside the package: it has wheels for
Linux on x86-64. The tests compare with this record, and with the emulation itself where it is installed.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fakequant as fq
from tests.support.qnn import FILE, NETWORKS, calibrated, codes, emulated, ranges_of


def main() -> None:
    record = dict[str, np.ndarray]()
    for name in NETWORKS:
        model, x = calibrated(name)
        with TemporaryDirectory() as folder:
            fq.export_onnx(model, x, path := Path(folder) / "model.onnx")
            record[f"{name}/codes"] = codes(model, emulated(path, x)).numpy().astype(np.uint16)
        record[f"{name}/ranges"] = ranges_of(model).numpy()
    np.savez_compressed(FILE, **record)
    print(f"{len(NETWORKS)} networks, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
