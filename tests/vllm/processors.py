"""What turns text and images into tokens for random models: a tokenizer, and a model that sees images of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from tests.vllm.engines import LLAMA, draw, write_model

IMAGE = 997
_SPECIAL = ("<image>", "<fake_token_around_image>", "<end_of_utterance>")
_TILE, _PATCH, _SCALE = 64, 16, 2
_VISION: dict[str, Any] = {
    "model_type": "idefics3_vision", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": _TILE, "patch_size": _PATCH,
}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, and of words that no text has, for a vocabulary of 1,000."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [*(f"word{i}" for i in range(IMAGE - len(words))), *_SPECIAL]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *_SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": list(_SPECIAL), **named})
    )


def write_seeing_model(folder: Path) -> Path:
    """A model of `LLAMA` behind a random image encoder of the Idefics3 kind: the more tiles an image has, the more
    tokens. `IMAGE` stands for an image in a prompt."""
    write_model(folder, LLAMA)
    with safe_open(folder / "model.safetensors", "pt") as text:
        weights = {name: text.get_tensor(name) for name in text.keys()}  # noqa: SIM118
    weights = {name.replace("model.", "model.text_model.", 1): weight for name, weight in weights.items()}
    width, inner, encoder = _VISION["hidden_size"], _VISION["intermediate_size"], "model.vision_model"
    layer = f"{encoder}.encoder.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        f"{encoder}.embeddings.patch_embedding": (width, 3, _PATCH, _PATCH),
        f"{encoder}.embeddings.position_embedding": ((_TILE // _PATCH) ** 2, width),
        **{f"{layer}.self_attn.{part}_proj": (width, width) for part in ("q", "k", "v", "out")},
        f"{layer}.mlp.fc1": (inner, width), f"{layer}.mlp.fc2": (width, inner),
        "model.connector.modality_projection.proj": (LLAMA["hidden_size"], width * _SCALE**2),
    }  # fmt: skip
    norms = {f"{layer}.layer_norm1": width, f"{layer}.layer_norm2": width, f"{encoder}.post_layernorm": width}
    drawn = draw(shapes, norms, LLAMA)
    for name in (*shapes, *norms):
        if not name.endswith(("position_embedding", "modality_projection.proj")):
            drawn[f"{name}.bias"] = drawn[f"{name}.weight"].new_zeros(drawn[f"{name}.weight"].shape[0])
    save_file(weights | drawn, folder / "model.safetensors", metadata={"format": "pt"})
    model = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "torch_dtype": "bfloat16",
        "text_config": LLAMA, "vision_config": _VISION, "image_token_id": IMAGE, "scale_factor": _SCALE,
        "tie_word_embeddings": False, "pad_token_id": 0,
    }  # fmt: skip
    image = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 4 * _TILE},
        "max_image_size": {"longest_edge": _TILE},
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (_TILE // _PATCH // _SCALE) ** 2}
    for name, config in {"config": model, "preprocessor_config": image, "processor_config": processor}.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder
