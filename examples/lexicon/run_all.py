"""The whole recipe by one command: base, clusters, experts, mixture, router, reward, definitions, scores.

    python examples/lexicon/run_all.py --config examples/lexicon/small.yml --data data/wordnet --work_dir runs/lexicon
    python examples/lexicon/run_all.py --config examples/lexicon/small.yml --data data/wordnet --ablation main lexical dense

Rows are those of prepare.py: a folder of train.jsonl, validation.jsonl, test.jsonl. Each step is a command that can be run
alone; it is printed, its settings and its log lie in its folder under WORK_DIR/steps. Interrupted, the same command goes on
where it stopped. A step whose settings, files and steps before it are the same as in an earlier run is not run again, and so
ablations share what they have in common. Times are those of all attempts together, and stand in WORK_DIR/run.json.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import yaml
from cli_args import read_yaml
from execution import Runner, StepFailed, check_options, lock_of, stamp_of
from run_folder import replace_file
from run_steps import DEFINITIONS, HERE, Planner, Step, is_behind, merged, read_config
from train_expert import refuse

MAIN = "main"
ORDER = (
    "base",
    "trunk",
    "cluster",
    "expert",
    "mixture",
    "router",
    "dense",
    "reward",
    "plain",
    "best",
    "evaluate",
    "sum",
)
EXAMPLES = 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, help="YAML of the recipe, such as small.yml")
    parser.add_argument("--data", help="folder of train.jsonl, validation.jsonl, test.jsonl, in place of the recipe's")
    parser.add_argument("--work_dir", help="folder for everything that is made, in place of the recipe's")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings over the recipe's: seed=21 expert.train=all"
    )
    parser.add_argument("--ablations", default=str(HERE / "ablations.yml"), help="YAML of named changes")
    parser.add_argument("--ablation", nargs="+", default=[MAIN], help=f"which of them; {MAIN} is the recipe itself")
    parser.add_argument(
        "--jobs", type=int, default=1, help="experts that are trained at once, with one thread each on CPUs"
    )
    parser.add_argument("--from", dest="start", metavar="STEP", help="run this step again, and those behind it")
    parser.add_argument("--dry_run", action="store_true", help="show the steps, and run none")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser.parse_args()


def given_settings(given: list[str]) -> dict:
    """["expert.train=all"] -> {"expert": {"train": "all"}}; values are YAML."""
    found: dict = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator or not name:
            raise ValueError(f"--set {one!r}: write KEY=VALUE, as in expert.num_train_epochs=2.")
        change = yaml.safe_load(value)
        for part in reversed(name.split(".")):
            change = {part: change}
        found = merged(found, change)
    return found


def read_plans(args: argparse.Namespace) -> dict[str, Planner]:
    """Each ablation's plan.

    Raises:
        ValueError: for an ablation or a step that is not known, and as `read_config`.
    """
    changes = given_settings(args.set)
    if args.data:
        changes |= {"data": args.data, **{f"{split}_files": None for split in ("train", "validation", "test")}}
    if args.work_dir:
        changes["work_dir"] = args.work_dir
    known = {} if args.ablation == [MAIN] else read_yaml(args.ablations)
    plans, digests = {}, {}
    for name in args.ablation:
        if name != MAIN and name not in known:
            raise ValueError(f"--ablation {name!r} is not in {args.ablations}: {', '.join([MAIN, *known])}.")
        own = {} if name == MAIN else known[name] or {}
        plans[name] = Planner(read_config(args.config, own, changes), digests)
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}: it must be 1 or more.")
    names = {one for plan in plans.values() for step in plan.steps for one in (step.name, step.kind)}
    if args.start and args.start not in names:
        raise ValueError(f"--from {args.start!r} is no step of this recipe: {', '.join(sorted(names))}.")
    return plans


def show(plans: dict[str, Planner], runner: Runner) -> None:
    """What would be run, and what stands already."""
    shown = set()
    for name, plan in plans.items():
        print(f"{name}:")
        for step in plan.steps:
            state = "done" if runner.is_done(step) else "as above" if step.key in shown else "to do"
            if state == "to do" and step.folder.exists():
                state = "begun"
            shown.add(step.key)
            print(f"  {step.name:10} {state:9} {runner.words(step)}")


def forget(plans: dict[str, Planner], start: str) -> None:
    """Removes what a step made, and what was made of it."""
    for plan in plans.values():
        for step in plan.steps:
            if is_behind(step, {start}) and step.folder.exists():
                os.close(lock_of(step))  # nobody is at work there
                shutil.rmtree(step.folder)


def scores_of(step: Step) -> dict[str, dict[str, float]]:
    """The output of evaluate.py -> system -> column -> per cent."""
    found = json.loads((step.out / "scores.json").read_text(encoding="utf-8"))
    table: dict = {}
    for system, protocols in found["systems"].items():
        table[system] = {}
        for protocol, metrics in protocols.items():
            if protocol == "mauve":  # of all rows at once
                table[system][protocol] = metrics["mean"]
                continue
            for metric, value in metrics.items():
                table[system][f"{metric} ({protocol})"] = value["mean"]
    return table


def print_table(rows: list[tuple[str, dict[str, str]]]) -> None:
    columns = list(dict.fromkeys(name for _, cells in rows for name in cells))
    lines = [["", *columns], *([name, *(cells.get(column, "") for column in columns)] for name, cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = (cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in
                        enumerate(zip(line, widths, strict=True)))  # fmt: skip
        print("  ".join([first, *rest]).rstrip())


def print_examples(steps: dict[str, Step]) -> None:
    """Ten definitions from all over the test rows, with what their domains are about."""
    chosen = steps.get("best") or steps["plain"]
    rows = [json.loads(line) for line in (chosen.out / DEFINITIONS).read_bytes().splitlines()]
    about = {}
    if "cluster" in steps:
        found = json.loads((steps["cluster"].out / "clusters.json").read_text(encoding="utf-8"))
        about = {i: f"{i}: {', '.join(terms[:3])}" for i, terms in enumerate(found["terms"])}
    count = min(EXAMPLES, len(rows))
    for i in [round(j * (len(rows) - 1) / max(count - 1, 1)) for j in range(count)]:
        row = rows[i]
        domain = f"  [{about.get(row['domain'], row['domain'])}]" if "domain" in row else ""
        print(
            f"\n{row['term']}{domain}\n  in     {row['context']}\n  wrote  {row['generated']}\n  gold   {row['definition']}"
        )


def report(name: str, plan: Planner, runner: Runner) -> dict:
    """Writes what was run and how long it took; -> the same."""
    steps = []
    for step in plan.steps:
        stamp = stamp_of(step)
        steps.append(
            {
                "name": step.name,
                "folder": str(step.folder),
                "seconds": stamp["seconds"],
                "run_now": step.key in runner.ran,
            }
        )
    config = {key: value for key, value in plan.config.items() if key != "beside"}
    found = {"config": config, "steps": steps, "seconds": round(sum(step["seconds"] for step in steps), 2)}
    evaluated = [step for step in plan.steps if step.kind == "evaluate"]
    found["scores"] = scores_of(evaluated[0]) if evaluated else {}
    path = plan.work / ("run.json" if name == MAIN else f"run.{name}.json")
    replace_file(path, json.dumps(found, ensure_ascii=False, indent=1))
    return found


def conclude(plans: dict[str, Planner], runner: Runner) -> None:
    """The tables and the examples that a run ends with."""
    reports = {name: report(name, plan, runner) for name, plan in plans.items()}
    scores = [
        (f"{name} {system}" if len(plans) > 1 else system, {column: f"{value:.2f}" for column, value in cells.items()})
        for name, found in reports.items()
        for system, cells in found["scores"].items()
    ]
    if scores:
        print("\nScores, per cent; the best over references of the same context, and of the same term in any sense\n")
        print_table(scores)
    print("\nSeconds of each step (those that stood before have brackets)\n")
    times: list = []
    for name, found in reports.items():
        cells = {}
        for step in found["steps"]:
            cells[step["name"]] = f"{step['seconds']:.0f}" if step["run_now"] else f"({step['seconds']:.0f})"
        times.append((name, cells | {"sum": f"{found['seconds']:.0f}"}))
    columns = {column for _, cells in times for column in cells}
    columns = sorted(columns, key=lambda column: (ORDER.index(column.split("-")[0]), len(column), column))
    print_table([(column, {name: cells.get(column, "") for name, cells in times}) for column in columns])
    name, plan = next(iter(plans.items()))
    print(f"\nDefinitions by {name}")
    print_examples({step.name: step for step in plan.steps})
    files = ", ".join("run.json" if name == MAIN else f"run.{name}.json" for name in plans)
    print(f"\nIn {plan.work}: {files}, and the steps' folders")


def run(args: argparse.Namespace, runner: Runner | None = None) -> None:
    plans = read_plans(args)
    runner = runner or Runner(args.jobs)
    if args.dry_run:
        return show(plans, runner)
    if args.start:
        forget(plans, args.start)
    steps = list({step.key: step for plan in plans.values() for step in plan.steps}.values())
    check_options([step for step in steps if not runner.is_done(step)])
    for name, plan in plans.items():
        if len(plans) > 1:
            print(f"\n{name}", flush=True)
        runner.run(plan.steps)
    conclude(plans, runner)


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # steps are ended with it
    try:
        run(args)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        without = ", without --from," if args.start else ""
        print(f"interrupted: the same command{without} goes on where it stopped", file=sys.stderr)
        sys.exit(130)
    except (OSError, ValueError, ImportError) as error:
        refuse(error)


if __name__ == "__main__":
    main()
