"""Every option of every command, with values that nobody should give: taken as said, or refused in one line."""

import io
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import sys
import warnings
from contextlib import redirect_stdout, suppress
from pathlib import Path

import numpy as np

from tests.campaigns import tables
from tests.campaigns.campaign import HOSTILE, Case, check_line, pick
from tests.support.configs import TINY, TINY_BASELINE
from tests.support.forked import Child
from tests.support.networks import tiny_network

MEMORY = 4 * 2**30
SECONDS = 60
CAPTURE = "../capture"
TRACES = "--ckpt ../tiny --data code --samples 2 --length 48"
LINES = {
    "probes": "--ckpt ../tiny --samples 2 --episodes 2",
    "probes.attention_sink": TRACES,
    "probes.massive_activations": TRACES,
    "probes.projection_similarity": TRACES,
    "probes.expert_overlap": TRACES,
    "probes.expert_load": TRACES,
    "probes.expert_tokens": TRACES,
    "probes.residual_updates": TRACES,
    "probes.induction": TRACES,
    "probes.representation_similarity": TRACES,
    "probes.joined": f"{TRACES} --y attention_sink:self_mass --shuffles 20",
    "probes.ablation": TRACES,
    "probes.logit_lens": TRACES,
    "probes.answer_lens": f"--ckpt ../tiny --capture {CAPTURE}",
    "probes.logit_attribution": TRACES,
    "probes.orbit": TRACES,
    "probes.early_exit": TRACES,
    "probes.weight_gradients": TRACES,
    "probes.patching": "--ckpt ../tiny --samples 2 --shots 1",
    "probes.dyck_icl": "--ckpt ../tiny --samples 2 --shots 0 1",
    "probes.domain_loss": TRACES,
    "probes.length_gain": TRACES,
    "probes.choice_tasks": "--ckpt ../tiny --samples 2 --shots 1 --data copy depth code --length 48",
    "probes.reproduction": "--pair ../tiny ../tiny-once --samples 2 --episodes 2 --items 2",
    "probes.over_training": "../tiny --samples 2 --data code --length 48",
    "probes.few_shot_gap": "--ckpt ../tiny --samples 2 --shots 0 1 --data recall --length 48",
    "cache.record": f"{TRACES} --out recorded",
    "cache.info": CAPTURE,
    "cache.verify": CAPTURE,
    "model.training.train": "--preset demo-smelt --out run --steps 1 --mixture.source excerpts",
    "model.training.pair": "--baseline demo --out pair --steps 1 --mixture.source excerpts",
    "model.training.sweep": "scale 1 --baseline demo --out sweep --steps 1 --mixture.source excerpts",
    "model.families.convert_gguf": "--gguf ../tiny/config.json --out converted",
    "smelt_interp.costs.budget": "--pair 200M",
    "smelt_interp.costs.matching": "--baseline demo --visits 2 --span 0.5",
    "smelt_interp.costs.sparsity": "--pair 200M",
    "smelt_interp.costs.serving": "--pair 200M --gpu h100",
    "smelt_interp.costs.residual_variance": "--pair demo",
    "smelt_interp.scaling": "fit ../runs.csv --draws 20",
    "smelt_interp.scaling.repeat": "../repeats.csv --draws 20",
    "smelt_interp.scaling.calibration": "fit ../scores.csv --draws 20",
    "smelt_interp.paper": "",
}
"""A short line of each command, run in an empty folder beside what it reads. `fetch_texts`, which takes no option and
fills the user's cache, is left out."""
OPTION = re.compile(r"^\W{0,4}(--[a-z][\w.-]*)", re.MULTILINE)
PATHS = ("../pipe", "../endless", "../folder", "../loop", "../tiny/config.json")


def campaign(folder: Path) -> Case:
    """A tiny checkpoint, its capture, two tables, and paths that are no plain files."""
    for name, config in (("tiny", TINY), ("tiny-once", TINY_BASELINE)):
        tiny_network(config).save_pretrained(folder / name, readme="# Tiny\n")
    for name, rows in (("runs", tables.runs()), ("scores", tables.scores()), ("repeats", tables.repeats())):
        (folder / f"{name}.csv").write_bytes(tables.text(rows))
    os.mkfifo(folder / "pipe")
    (folder / "endless").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    code, _, errors = run(folder, "cache.record", [*shlex.split(LINES["cache.record"]), "--out", CAPTURE])
    assert code == 0, errors
    options: dict[str, list[str]] = {}

    def case(random: np.random.Generator) -> str:
        module = pick(random, sorted(LINES))
        words = shlex.split(LINES[module])
        if module not in options:
            options[module] = options_of(module, words[:1])
        value = pick(random, (*HOSTILE, *PATHS))
        places = [at for at, word in enumerate(words) if not word.startswith("--")]
        if random.random() < 0.3 and places:
            words[pick(random, places)] = value
        else:
            words += [pick(random, options[module]), *([value] if random.random() < 0.95 else [])]
        words += ["--json"] if "--json" in options[module] and random.random() < 0.5 else []
        code, _, errors = run(folder, module, words)
        said = shlex.join([module, *words])[:400]
        assert code in (0, 1, 2), f"{said}: exit {code}: {errors[-600:]}"
        assert "Traceback" not in errors, f"{said}: {errors[-600:]}"
        if code == 0:
            return "taken"
        last = errors.splitlines()[-1]
        assert last.startswith("error: "), f"{said}: {errors[-600:]}"
        check_line(last.removeprefix("error: "))
        return "refused"

    return case


def options_of(module: str, first: list[str]) -> list[str]:
    """The options that a command's help names; `first` may be the name of a subcommand."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [module, *(word for word in first if word in ("fit", "printed")), "--help"]
    try:
        with redirect_stdout(out), suppress(SystemExit):
            run_module(module)
    finally:
        sys.argv = argv
    found = sorted(set(OPTION.findall(re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()))) - {"--help"})
    assert found or module.startswith("cache."), f"{module} --help names no option"
    return found or ["--help"]


def run_module(module: str) -> None:
    """What `python -m` does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # it runs once more, as -m does
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def run(folder: Path, module: str, words: list[str]) -> tuple[int, str, str]:
    """A command in a process of its own, in an empty folder, with bounds on time and memory. -> code, output, errors"""
    place = folder / "place"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()

    def work() -> None:
        os.chdir(place)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        signal.alarm(SECONDS)
        with (folder / "output").open("wb") as file:
            os.dup2(file.fileno(), 1)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = [module, *words]
        run_module(module)

    code, errors = Child(work).wait()
    return code, (folder / "output").read_text(encoding="utf-8", errors="replace"), errors
