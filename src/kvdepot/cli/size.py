"""`kvdepot size`: how many tokens, prompts and chats of a model some memory holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdepot.cli import options
from kvdepot.cli.output import clean, count, print_json, print_tables
from kvdepot.cli.output import size as shown
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.simulate.kv_size import KvSize

__all__ = ["size"]

_DEFAULT_SIZES = ("16GiB", "64GiB", "256GiB")
_MOST_CONFIG = 64 << 20
_COUNTS = ("tokens", "prompts", "chats")
_COUNT = click.IntRange(1, 1 << 30)


@click.command()
@click.argument("config", metavar="[MODEL_CONFIG]", required=False)
@click.option("-g", "--gib", "sizes", multiple=True, metavar="SIZE", help="memory, e.g. 64 (GiB) or 512MiB; can be "
    "repeated (default: 16, 64 and 256 GiB)")  # fmt: skip
@click.option("--kv-dtype", type=click.Choice(["auto", "bf16", "fp16", "fp32", "fp8"]), default="auto", help="type of "
    "the KV cache (default: auto, as the configuration says)")  # fmt: skip
@click.option("--bytes-per-token", metavar="SIZE", help="KV of a token, instead of a configuration, e.g. 128KiB")
@click.option("--prompt-tokens", type=_COUNT, default=8192, metavar="N", help="tokens of a prompt (default: 8192)")
@click.option("--chat-tokens", type=_COUNT, default=4096, metavar="N", help="tokens of a chat with all its turns "
    "(default: 4096)")  # fmt: skip
@click.option("--chunk-size", type=_COUNT, default=256, metavar="N", help="tokens per chunk (default: 256)")
@options.as_json
def size(
    config: str | None, sizes: tuple[str, ...], kv_dtype: str, bytes_per_token: str | None, prompt_tokens: int,
    chat_tokens: int, chunk_size: int, as_json: bool,
) -> int:  # fmt: skip
    """Show how much KV a model has per token, and how many tokens, prompts and chats of it fit into memory.

    MODEL_CONFIG is the model's config.json, its folder, or - for standard input; nothing is downloaded. Tensor and
    pipeline parallelism do not matter: the parts of all ranks add up to the same memory. Each turn of a chat extends
    the same prefix, so a chat counts once. Engines on CPUs take /dev/shm for their own KV as well, beside the server's:
    VLLM_CPU_KVCACHE_SPACE.
    """
    from kvdepot.simulate.kv_size import KvSize, kv_size

    if bool(config) == bool(bytes_per_token):
        raise click.UsageError("give either MODEL_CONFIG or --bytes-per-token")
    if config is None:
        model = KvSize("the model", 0, "", options.size_of("--bytes-per-token", bytes_per_token or "", 1))
    else:
        model = kv_size(_read(config), kv_dtype)
    capacities = [options.size_of("--gib", text, 1 << 30) for text in sizes or _DEFAULT_SIZES]
    prompt, chat = (model.prompt_bytes(tokens, chunk_size) for tokens in (prompt_tokens, chat_tokens))
    if not prompt or not chat:
        if not model.token_bytes and not model.windows:
            raise ConfigError("no layer of the model has KV per token: its size depends on its states, not on tokens")
        raise ConfigError(f"--prompt-tokens and --chat-tokens must be at least a chunk ({chunk_size} tokens)")
    average = prompt / (prompt_tokens // chunk_size * chunk_size)
    rows = [
        {"bytes": each, "tokens": int(each / average), "prompts": each // prompt, "chats": each // chat}
        for each in capacities
    ]
    if as_json:
        print_json(
            {
                "model": model.model, "layers": model.layers, "kv_dtype": model.dtype,
                "bytes_per_token": model.token_bytes,
                "windows": [{"tokens": window, "bytes_per_token": each} for window, each in model.windows.items()],
                "state_layers": model.states, "prompt_tokens": prompt_tokens, "prompt_bytes": prompt,
                "chat_tokens": chat_tokens, "chat_bytes": chat, "sizes": rows,
            }
        )  # fmt: skip
        return 0
    print("\n".join(_lines(model)) + "\n", flush=True)
    from kvdepot.cli.view import Listing

    heads = (">memory", ">tokens", f">prompts of {count(prompt_tokens)}", f">chats of {count(chat_tokens)}")
    print_tables(Listing(heads, [(shown(row["bytes"]), *(count(row[name]) for name in _COUNTS)) for row in rows]))
    return 0


def _lines(model: KvSize) -> list[str]:
    if not model.layers:
        return [f"{shown(model.token_bytes)} of KV per token"]
    lines = [f"{clean(model.model)}, {model.layers} layers, KV in {model.dtype}"]
    if model.token_bytes:
        lines.append(f"{shown(model.token_bytes)} of KV per token")
    lines += [
        f"{shown(each)} per token in layers with a window of {count(window)} tokens, which are stored where prompts "
        "end or diverge, and every 16 chunks"
        for window, each in model.windows.items()
    ]
    if model.states:
        lines.append(f"{model.states} layers have states, whose size is not counted")
    return lines


def _read(place: str) -> dict[str, Any]:
    """The configuration in a file or folder; `-`: standard input. Raises ConfigError."""
    path = Path("standard input" if place == "-" else place)
    name = clean(str(path))
    try:
        if place != "-" and path.is_dir():
            path /= "config.json"
        text = sys.stdin.read(_MOST_CONFIG) if place == "-" else path.read_bytes()[:_MOST_CONFIG].decode()
        found = json.loads(text)
    except OSError as exc:
        hint = ": give the config.json of a model that you have; nothing is downloaded"
        raise ConfigError(f"{name}: {exc.strerror}{hint * isinstance(exc, FileNotFoundError)}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{name}: not JSON, the config.json of a model is expected: {clean(str(exc))[:200]}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: not the configuration of a model: a JSON object is expected")
    return found
