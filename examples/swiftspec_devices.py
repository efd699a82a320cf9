"""SwiftSpec on several devices: the draft grows its tree on devices of its own while the target verifies.

    python examples/swiftspec_devices.py

A CPU is split into four devices here, which shows how it is set up and not how fast it is: they share the same cores.
On a machine with four accelerators, leave the line with `jax_num_cpu_devices` out.
"""

import jax

import jaxspec

PROMPT = [{"role": "user", "content": "What is the capital of Japan, and what is it known for?"}]


def main() -> None:
    """Two devices for the target, one for the draft; the tokens are those of plain decoding."""
    jax.config.update("jax_num_cpu_devices", 4)  # before anything is computed
    sampling = jaxspec.SamplingParams(max_tokens=48)
    method = jaxspec.SwiftSpec(num_draft_tokens=7, width=8)
    llm = jaxspec.LLM(method=method, target_devices=2, draft_devices=1)
    out = llm.chat(PROMPT, sampling)
    print(out.text)
    counters = out.stats.speculative_decoding
    assert counters is not None and counters.draft_tree is not None
    print(f"{counters.mean_acceptance_length:.2f} tokens per target pass")
    print(f"the new root was in the tree after {counters.draft_tree.token_hit_rate:.0%} of the rounds")
    assert llm.with_method("ar").chat(PROMPT, sampling).token_ids == out.token_ids


if __name__ == "__main__":
    main()
