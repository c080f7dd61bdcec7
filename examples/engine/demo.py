"""A trainer that writes checkpoints, an inference server that reads a folder, and two commands
between them: no line of Python of yours. It needs `mistralrs` and `curl`::

    python examples/engine/demo.py

The checkpoints are those of a small model that this program makes. It is a Llama whose layers add
nothing, so it answers with one letter, which is another one in each version.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<s>", "</s>", *LETTERS]
WIDTH, LAYERS, INNER = 64, 2, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": len(TOKENS),
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": BYTES,
    "decoder": BYTES,
    "model": {
        "type": "BPE",
        "vocab": {token: number for number, token in enumerate(TOKENS)},
        "merges": [],
    },
}
PATIENCE = 60.0
"""Seconds in which the server has a checkpoint."""
EXEC = "curl -fsS -o /dev/null -X POST {url}/reload?version=$AIODIST_VERSION"


def checkpoint(folder: Path, letter: str) -> None:
    """Write a model that answers with this letter."""
    scores = np.zeros((len(TOKENS), WIDTH), np.float32)
    scores[TOKENS.index(letter)] = 1
    ones = np.ones(WIDTH, np.float32)
    weights = {
        "model.embed_tokens.weight": np.ones((len(TOKENS), WIDTH), np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": scores,
    }
    attention = {f"self_attn.{one}_proj": (WIDTH, WIDTH) for one in "qkvo"}
    inner = {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, shape in (attention | inner | {"mlp.down_proj": (WIDTH, INNER)}).items():
            weights[f"{name}.{part}.weight"] = np.zeros(shape, np.float32)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{part}.weight"] = ones
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def ask(url: str) -> dict[str, str]:
    """What the server makes of a prompt, and with which version."""
    body = json.dumps({"prompt": "abc", "max_tokens": 4}).encode()
    try:
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=60) as answer:
            found: dict[str, str] = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return {"version": "none"}  # so far
    return found


def main() -> None:
    os.environ["AIODIST_TOKEN"] = secrets.token_hex()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        (folder / "checkpoints").mkdir()

        def start(*command: str | Path) -> str:
            """Start a program that runs to the end of this one, and return its first line."""
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE)
            ends.callback(process.wait)
            ends.callback(process.terminate)
            assert process.stdout is not None
            return process.stdout.readline().decode()

        aiodist = ("-m", "aiodist_cli")
        listening = start(*aiodist, "coordinator", "--listen", "tcp://127.0.0.1:0")
        os.environ["AIODIST_ADDRESS"] = listening.split()[2]
        url = start(Path(__file__).with_name("serve.py"), folder / "model", "--port", "0").split()[
            1
        ]
        weights = (*aiodist, "weights")
        pull = ("policy", "--to", folder / "model", "--follow", "--exec", EXEC.format(url=url))
        for version, letter in enumerate("xyz"):
            checkpoint(folder / "checkpoints" / f"checkpoint-{version}", letter)
            if not version:
                start(*weights, "push", "policy", folder / "checkpoints", "--watch")
                start(*weights, "pull", *pull)
            end = time.monotonic() + PATIENCE
            while (found := ask(url))["version"] != str(version):
                assert time.monotonic() < end, f"the server still answers with {found}"
                time.sleep(0.1)
            assert found["text"] == 4 * letter, found
            print(f"version {version}: 'abc' goes on with {found['text']!r}", flush=True)


if __name__ == "__main__":
    main()
