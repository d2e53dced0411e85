"""A model folder that real servers accept: a tokenizer of single bytes and a configuration, no weights.

python tiny_model.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY = 4096
SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def tokenizer() -> dict[str, object]:
    """Byte-level BPE without merges: one token a byte, so prompts are as long as their text.

    The other tokens are what answers are made of: words, since a server holds back bytes that are no text yet.
    """
    known = [*SPECIAL, *byte_letters()]
    known += [f"Ġw{rank}" for rank in range(len(known), VOCABULARY)]
    vocabulary = {word: rank for rank, word in enumerate(known)}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": rank, "content": word, **flags, "special": True}
            for rank, word in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip


def files(hidden: int = 256, layers: int = 4) -> dict[str, object]:
    """The files of the folder."""
    return {
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768, "chat_template": TEMPLATE,
            "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>",
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": hidden // 4, "vocab_size": VOCABULARY,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0},
    }  # fmt: skip


def make(folder: Path) -> Path:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
