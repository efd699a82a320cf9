#!/usr/bin/env python3
"""Make tests/golden/families.json: logits of tiny random models by Hugging Face transformers on torch.

    tools/make_family_golden.py

The models are those of tests/make.py, written as Hugging Face folders, which transformers opens. The tests
that read the file need neither torch nor transformers' models.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "checkpoint"), str(ROOT / "tests")]

from golden_families import GOLDEN, TOKENS, config_of, hf_tensors  # noqa: E402  # pyright: ignore[reportMissingImports]
from make import write_hf  # noqa: E402  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Write the file."""
    golden = {}
    for name in GOLDEN:
        with tempfile.TemporaryDirectory() as folder:
            write_hf(Path(folder), config_of(name), hf_tensors(name), changes={"pad_token_id": None})
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()
            with torch.no_grad():
                logits = model(torch.tensor([TOKENS])).logits[0, ::4].numpy()
        golden[name] = [[float(f"{number:.6g}") for number in row] for row in np.asarray(logits)]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in golden.items())
    path = ROOT / "tests" / "golden" / "families.json"
    path.write_text(f'{{\n"made_with": {json.dumps(versions)},\n{rows}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
