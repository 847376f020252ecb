"""Try the newest release of each framework: `python benchmarks/newest.py [NAME …] [--write]`.

For a nightly job. Each framework is installed from the package index into an environment of its
own, on top of the torch that is here, saves one small state, and ftckpt is asked about it: inspect,
verify, latest, and a conversion that verify passes. `--write` puts the table with the date into
docs/formats.md. What cannot be installed or does not save here is said so, and is not a failure of
ftckpt: exit 1 means that ftckpt answered wrongly.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "formats.md"
BEGIN, END = "<!-- newest: begin -->", "<!-- newest: end -->"
_INSTALL, _ASK = 900, 120  # seconds

_MODEL = """
import sys, torch
torch.manual_seed(0)
root = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(2, 8)).sum().backward()
optimizer.step()
"""


class Framework(NamedTuple):
    """One framework.

    Attributes:
        package: what is installed, and whose version is told.
        save: a program that saves a step below its first argument.
        to: the format that it is converted to.
        needs: further packages.
    """

    package: str
    save: str
    to: str
    needs: Sequence[str] = ()


FRAMEWORKS = {
    "torch": Framework(
        "torch",
        _MODEL
        + "import torch.distributed.checkpoint as dcp\n"
        + "state = {'model': model.state_dict(), 'optim': optimizer.state_dict()}\n"
        + "dcp.save(state, checkpoint_id=f'{root}/step-5', no_dist=True)\n",
        "safetensors",
    ),
    "accelerate": Framework(
        "accelerate",
        _MODEL
        + "from accelerate import Accelerator\n"
        + "a = Accelerator(cpu=True)\n"
        + "model, optimizer = a.prepare(model, optimizer)\n"
        + "a.save_state(f'{root}/checkpoint_5')\n",
        "dcp",
    ),
    "transformers": Framework(
        "transformers",
        "import sys\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,\n"
        "    num_attention_heads=4, num_key_value_heads=2, vocab_size=64)\n"
        "LlamaForCausalLM(config).save_pretrained(f'{sys.argv[1]}/checkpoint-5')\n",
        "dcp",
    ),
    "peft": Framework(
        "peft",
        _MODEL
        + "from peft import LoraConfig, get_peft_model\n"
        + "tuned = get_peft_model(model, LoraConfig(r=2, target_modules=['0', '1']))\n"
        + "[torch.nn.init.normal_(p) for n, p in tuned.named_parameters() if 'lora_B' in n]\n"
        + "tuned.save_pretrained(f'{root}/checkpoint-5')\n",
        "dcp",
        ("transformers", "accelerate"),
    ),
    "lightning": Framework(
        "lightning",
        _MODEL
        + "import lightning\n"
        + "class Small(lightning.LightningModule):\n"
        + "    def __init__(self):\n"
        + "        super().__init__()\n"
        + "        self.net = model\n"
        + "    def training_step(self, batch, _):\n"
        + "        return self.net(batch).sum()\n"
        + "    def configure_optimizers(self):\n"
        + "        return torch.optim.AdamW(self.parameters())\n"
        + "data = torch.utils.data.DataLoader(torch.rand(10, 8), batch_size=2)\n"
        + "trainer = lightning.Trainer(max_epochs=1, accelerator='cpu', logger=False,\n"
        + "    enable_checkpointing=False, enable_progress_bar=False)\n"
        + "trainer.fit(Small(), data)\n"
        + "trainer.save_checkpoint(f'{root}/epoch=0-step=5.ckpt')\n",
        "safetensors",
    ),
    "orbax": Framework(
        "orbax-checkpoint",
        "import sys, numpy, orbax.checkpoint as ocp\n"
        "with ocp.CheckpointManager(sys.argv[1]) as manager:\n"
        "    state = {'w': numpy.arange(12.0).reshape(3, 4)}\n"
        "    manager.save(5, args=ocp.args.StandardSave(state))\n",
        "safetensors",
        ("jax[cpu]",),
    ),
}


class Row(NamedTuple):
    """What came of one framework: its version, and each answer or why there is none."""

    name: str
    version: str
    answers: Sequence[str]
    wrong: bool = False


def main(words: Sequence[str]) -> int:
    """Try frameworks; return 1 where ftckpt answered wrongly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FRAMEWORKS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/formats.md")
    given = parser.parse_args(words)
    rows = []
    for name in given.names or FRAMEWORKS:
        rows.append(tried(name, FRAMEWORKS[name]))
        print(f"{name} {rows[-1].version}: {', '.join(rows[-1].answers)}", flush=True)
    if given.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{rest.split(END)[1]}")
    return int(any(row.wrong for row in rows))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown, with the day."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [f"Tried on {day}:\n", "| framework | release | answers |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.version or '?'} | {', '.join(row.answers)} |" for row in rows]
    return "\n".join(lines) + "\n"


def tried(name: str, framework: Framework) -> Row:
    """Install a framework, save a state, and ask about it."""
    with tempfile.TemporaryDirectory(prefix="newest-") as folder:
        python = sys.executable
        env = dict(os.environ)
        if framework.package != "torch":
            venv.create(f"{folder}/env", with_pip=True)
            python = f"{folder}/env/bin/python"
            env["PYTHONPATH"] = sysconfig.get_paths()["purelib"]
            pip = [python, "-m", "pip", "install", "-q", framework.package, *framework.needs]
            if why := failure(pip, env, _INSTALL):
                return Row(name, "", [f"not installed here: {why}"])
        ask = f"import importlib.metadata as m; print(m.version('{framework.package}'))"
        version = subprocess.run([python, "-c", ask], env=env, capture_output=True, text=True)
        told = version.stdout.strip()
        root = Path(folder, "run")
        root.mkdir()
        if why := failure([python, "-c", framework.save, str(root)], env, _ASK * 3):
            return Row(name, told, [f"does not save here: {why}"])
        return asked(name, told, root, framework.to)


def asked(name: str, version: str, root: Path, to: str) -> Row:
    """Ask ftckpt about a root with one saved step."""
    answers, wrong = [], False
    found = subprocess.run(ftckpt("latest", str(root)), capture_output=True, text=True)
    step = found.stdout.strip() or str(next(iter(root.iterdir())))
    made = str(root.parent / "made")
    for verb, line in {
        "latest": ftckpt("latest", str(root)),
        "inspect": ftckpt("inspect", step),
        "verify": ftckpt("verify", step, "--level", "values"),
        f"convert --to {to}": ftckpt("convert", step, made, "--to", to),
        "verify the result": ftckpt("verify", made),
    }.items():
        done = subprocess.run(line, capture_output=True, text=True, timeout=_ASK)
        answers.append(f"{verb} {done.returncode}")
        if done.returncode:
            wrong = True
            said = done.stderr.strip().splitlines()
            answers[-1] += f" ({said[0][:120]})" if said else ""
    return Row(name, version, answers, wrong)


def ftckpt(*words: str) -> list[str]:
    """Return a command line of this very tree."""
    return [sys.executable, "-m", "ftckpt", *words]


def failure(line: Sequence[str], env: dict[str, str], limit: int) -> str:
    """Run a command; return why it failed, "" where it did not."""
    try:
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"not done after {limit} s"
    if not done.returncode:
        return ""
    last = [one for one in done.stderr.strip().splitlines() if one and "WARNING" not in one][-1:]
    return re.sub(r"[|`]", "", "".join(last))[:160]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
