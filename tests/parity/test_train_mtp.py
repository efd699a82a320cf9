"""The steps that `tools/train_mtp.py` teaches an MTP layer against a chain of the layer in NumPy."""

import numpy as np
import torch
import transformers
from mtp_folders import MtpReference, write_mtp
from safetensors.torch import load_file
from tiny_models import relative_error
from train_mtp import Mtp, steps_of


def test_the_steps_of_training_are_those_of_a_chain(tmp_path):
    folder = write_mtp(tmp_path)
    reference, found = MtpReference(folder), load_file(folder / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mtp = Mtp(model.config)
    mtp.load_state_dict({name.removeprefix("mtp."): t for name, t in found.items() if name.startswith("mtp.")})
    text = np.random.default_rng(3).integers(0, model.config.vocab_size, 20)
    with torch.no_grad():
        token = torch.tensor(text[None])
        states = model.model(token).last_hidden_state
        got = [model.lm_head(own)[0].numpy() for own in steps_of(mtp, model, token, states, 3)]
    for row in (16, 9, 0):
        expected = reference.logits(text[: row + 2], states[0, : row + 1].numpy(), text[row + 2 : row + 4].tolist())
        assert relative_error(np.stack([step[row] for step in got]), expected) < 2e-5
