"""Coverage-guided fuzzing of the targets in targets.py, bounded in time.

    python fuzz/run.py [--seconds 60] [TARGET...]     fuzz each target for this time; exit code 1 if one failed
    python fuzz/run.py --replay FILE [TARGET]         run one input again, without atheris; FILE's name gives the target

Inputs that fail are kept in fuzz/found/ and printed. Exit code 3: atheris (https://github.com/google/atheris, which
includes libFuzzer) is not installed; it has wheels for some Python versions only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOUND = HERE / "found"
TARGETS = ("requests", "replies", "config", "records", "table", "arena")
UNIT_S = 20
"""An input that takes longer counts as a failure."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing, bounded in time.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--replay", metavar="FILE", type=Path, help="run one input again")
    parser.add_argument("--inside", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)  # one target, in this process
    args = parser.parse_args()
    if unknown := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]!r}, only {', '.join(TARGETS)}")
    sys.path.insert(0, str(HERE.parent))
    if args.replay is not None:
        return _replay(args.replay, args.targets)
    if importlib.util.find_spec("atheris") is None:
        print(
            f"atheris is not installed for Python {sys.version_info.major}.{sys.version_info.minor}: "
            "`pip install atheris`, which has wheels for 3.11 to 3.13.\n"
            "Without it, tests/test_fuzz.py tries the same properties with Hypothesis."
        )
        return 3
    if args.inside is not None:
        _fuzz(args.targets[0], args.inside, args.seconds)
    failed = [name for name in args.targets or TARGETS if not _run(name, args.seconds)]
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def _run(name: str, seconds: int) -> bool:
    """Fuzz one target in a process of its own (libFuzzer ends it); returns whether nothing failed."""
    FOUND.mkdir(exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvdepot-fuzz-") as folder:
        command = [sys.executable, str(HERE / "run.py"), name, "--seconds", str(seconds), "--inside", folder]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
                timeout=seconds + 2 * UNIT_S + 30,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{name}: did not end {2 * UNIT_S + 30} s after its time")
            return False
        crashes = sorted(Path(folder).glob("found-*"))
        kept = []
        for crash in crashes:
            kind, digest = re.sub(r"^found-", "", crash.name).split("-", 1)
            kept.append(FOUND / f"{name}-{kind}-{digest[:12]}")
            kept[-1].write_bytes(crash.read_bytes())
    units = re.findall(r"stat::number_of_executed_units:\s+(\d+)|^#(\d+)\s", done.stdout, re.M)
    executions = max((int(a or b) for a, b in units), default=0)
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", done.stdout)
    edges, features, corpus = coverage[-1] if coverage else (0, 0, 0)
    print(
        f"{name}: {executions} executions in {time.monotonic() - begun:.0f} s, coverage {edges} edges, "
        f"{features} features, {corpus} inputs in the corpus",
        flush=True,
    )
    if not done.returncode and not kept:
        return True
    story = done.stdout[done.stdout.find(" === Uncaught Python exception") :]
    print(story[-4000:] if "Uncaught" in done.stdout else done.stdout[-4000:])
    for path in kept:
        print(f"input ({path.stat().st_size} bytes): {path.read_bytes().hex()}")
        print(f"again: python fuzz/run.py --replay {path}")
    return False


def _fuzz(name: str, folder: Path, seconds: int) -> None:
    """Fuzz one target in this process. Does not return."""
    import atheris

    with atheris.instrument_imports(include=["kvdepot", "fuzz.targets"]):
        from fuzz.targets import TARGETS as targets
    corpus = folder / "corpus"
    corpus.mkdir()
    target = targets[name]
    for number, seed in enumerate(target.seeds()):
        (corpus / f"{number:04}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}", f"-artifact_prefix={folder}/found-", f"-timeout={UNIT_S}", "-max_len=4096",
        "-rss_limit_mb=4096", "-print_final_stats=1", "-len_control=0", str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], target.check)
    atheris.Fuzz()


def _replay(file: Path, names: list[str]) -> int:
    from fuzz.targets import TARGETS as targets

    name = names[0] if names else file.name.split("-")[0]
    if name not in targets:
        print(f"say which target {file} is for: {', '.join(targets)}")
        return 2
    with contextlib.suppress(BrokenPipeError):
        print(f"{name}, {file.stat().st_size} bytes", flush=True)
    targets[name].check(file.read_bytes())  # raises as it did
    print("nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
