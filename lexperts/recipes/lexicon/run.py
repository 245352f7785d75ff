"""Runs the whole recipe: base, clusters, experts, mixture, router, reward, definitions, scores.

    lexperts define run small --data data/wordnet
    lexperts define run small --data data/wordnet --jobs 2 --ablation main lexical dense
    lexperts define run --show-config small

Data is a folder of train.jsonl, validation.jsonl and test.jsonl, as `lexperts define prepare` writes it. Everything that the
run will need is checked before the first step. Each step is a command that can be run by itself; it is printed, and its
settings and log are in its folder in WORK_DIR/steps. Start the same command again after an interruption: it resumes. A step
is not repeated if its settings, files and inputs are those of an earlier run, and so ablations share steps. The times of all
attempts are in WORK_DIR/run.json.
"""

import json
import os
import shutil
import signal
import sys

from run_tools.errors import UserError, did_you_mean, short_repr
from run_tools.yaml_files import parse_yaml, read_yaml

from ..common.arguments import command, parse_command
from ..common.configurations import find_config
from ..common.jsonl_resume import read_lines
from ..common.run_folder import replace_file
from ..common.tables import align_columns
from .arguments import RunArguments
from .preflight import check_run
from .runner import Runner, acquire_lock, read_stamp
from .steps import DEFINITIONS, FOLDER, Planner, Step, depends_on, merge_configs, read_config

MAIN = "main"
ORDER = (
    "base", "shared_finetune", "cluster", "expert", "mixture", "router", "dense", "reward", "plain", "best", "evaluate",
    "sum",
)  # fmt: skip
EXAMPLES = 10


def parse_changes(values: list[str]) -> dict:
    """["expert.train=all"] -> {"expert": {"train": "all"}}; values are YAML."""
    changes: dict = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise UserError(f"--set {short_repr(value)} must be KEY=VALUE, as in expert.num_train_epochs=2.")
        change = parse_yaml(text, f"--set {short_repr(value)}")
        for part in reversed(name.split(".")):
            change = {part: change}
        changes = merge_configs(changes, change)
    return changes


def make_plans(args: RunArguments) -> dict[str, Planner]:
    """The plan of each ablation. Raises a `ValueError` for an unknown ablation or step, and as in `read_config`."""
    changes, config = parse_changes(args.set), find_config(args.config, "lexicon", "run")
    if args.data:
        changes |= {"data": args.data, **{f"{split}_files": None for split in ("train", "validation", "test")}}
    if args.work_dir:
        changes["work_dir"] = args.work_dir
    path = args.ablations or FOLDER / "ablations.yml"
    ablations = {} if args.ablation == [MAIN] else read_yaml(path)
    plans, digests = {}, {}
    for name in args.ablation:
        if name != MAIN and name not in ablations:
            raise UserError(f"--ablation {name!r} is not in {path}.{did_you_mean(name, [MAIN, *ablations])}")
        ablation = {} if name == MAIN else ablations[name] or {}
        plans[name] = Planner(read_config(config, ablation, changes), digests)
    names = {name for plan in plans.values() for step in plan.steps for name in (step.name, step.kind)}
    if args.from_step and args.from_step not in names:
        raise UserError(
            f"--from-step {args.from_step!r} is not a step of this recipe.{did_you_mean(args.from_step, names)}"
        )
    return plans


def show_plans(plans: dict[str, Planner], runner: Runner) -> None:
    """Prints the steps, and which of them are complete."""
    shown = set()
    for name, plan in plans.items():
        print(f"{name}:")
        for step in plan.steps:
            state = "done" if runner.is_done(step) else "as above" if step.key in shown else "to do"
            if state == "to do" and step.folder.exists():
                state = "started"
            shown.add(step.key)
            print(f"  {step.name:15} {state:9} {runner.command_line(step)}")


def read_scores(step: Step) -> dict[str, dict[str, float]]:
    """The scores.json of a step -> per cent by system and column."""
    scores = json.loads((step.out / "scores.json").read_text(encoding="utf-8"))
    table: dict = {}
    for system, protocols in scores["systems"].items():
        table[system] = {}
        for protocol, metrics in protocols.items():
            if protocol == "mauve":  # of all rows together
                table[system][protocol] = metrics["mean"]
                continue
            for metric, value in metrics.items():
                table[system][f"{metric} ({protocol})"] = value["mean"]
    return table


def print_table(rows: list[tuple[str, dict[str, str]]]) -> None:
    """Prints named rows with the columns that they have."""
    columns = list(dict.fromkeys(name for _, cells in rows for name in cells))
    lines = [["", *columns], *([name, *(cells.get(column, "") for column in columns)] for name, cells in rows)]
    print(align_columns(lines, right=True))


def print_examples(steps: dict[str, Step]) -> None:
    """Prints ten definitions of test rows, with typical terms of their domains."""
    step = steps.get("best") or steps["plain"]
    rows = read_lines(step.out / DEFINITIONS)
    domains = {}
    if "cluster" in steps:
        clusters = json.loads((steps["cluster"].out / "clusters.json").read_text(encoding="utf-8"))
        domains = {i: f"{i}: {', '.join(terms[:3])}" for i, terms in enumerate(clusters["terms"])}
    count = min(EXAMPLES, len(rows))
    for i in [round(j * (len(rows) - 1) / max(count - 1, 1)) for j in range(count)]:
        row = rows[i]
        domain = f"  [{domains.get(row['domain'], row['domain'])}]" if "domain" in row else ""
        print(f"\n{row['term']}{domain}\n  context    {row['context']}")
        print(f"  generated  {row['generated']}\n  gold       {row['definition']}")


def write_report(name: str, plan: Planner, runner: Runner) -> dict:
    """Writes the configuration, steps, times and scores of a plan to run.json -> its content."""
    steps = []
    for step in plan.steps:
        seconds, run_now = read_stamp(step)["seconds"], step.key in runner.ran
        steps.append({"name": step.name, "folder": str(step.folder), "seconds": seconds, "run_now": run_now})
    config = {key: value for key, value in plan.config.items() if key != "folder"}
    report = {"config": config, "steps": steps, "seconds": round(sum(step["seconds"] for step in steps), 2)}
    evaluated = [step for step in plan.steps if step.kind == "evaluate"]
    report["scores"] = read_scores(evaluated[0]) if evaluated else {}
    path = plan.work / ("run.json" if name == MAIN else f"run.{name}.json")
    replace_file(path, json.dumps(report, ensure_ascii=False, indent=1))
    return report


def print_results(plans: dict[str, Planner], runner: Runner) -> None:
    """Writes the reports; prints scores, times and examples."""
    reports = {name: write_report(name, plan, runner) for name, plan in plans.items()}
    scores = [
        (f"{name} {system}" if len(plans) > 1 else system, {column: f"{value:.2f}" for column, value in cells.items()})
        for name, report in reports.items()
        for system, cells in report["scores"].items()
    ]
    if scores:
        print("\nScores in per cent, with references of the same context, and of the same term in any sense\n")
        print_table(scores)
    print("\nSeconds per step (in brackets: of an earlier run)\n")
    times: list = []
    for name, report in reports.items():
        cells = {}
        for step in report["steps"]:
            cells[step["name"]] = f"{step['seconds']:.0f}" if step["run_now"] else f"({step['seconds']:.0f})"
        times.append((name, cells | {"sum": f"{report['seconds']:.0f}"}))
    columns = {column for _, cells in times for column in cells}
    columns = sorted(columns, key=lambda column: (ORDER.index(column.split("-")[0]), len(column), column))
    print_table([(column, {name: cells.get(column, "") for name, cells in times}) for column in columns])
    name, plan = next(iter(plans.items()))
    print(f"\nDefinitions of {name}")
    print_examples({step.name: step for step in plan.steps})
    files = ", ".join("run.json" if name == MAIN else f"run.{name}.json" for name in plans)
    print(f"\nIn {plan.work}: {files}, and the folders of the steps")


def run(args: RunArguments, runner: Runner | None = None) -> None:
    """Checks and runs all steps that are not complete, and prints the results."""
    plans = make_plans(args)
    runner = runner or Runner(args.jobs)
    if args.dry_run:
        return show_plans(plans, runner)
    steps = list({step.key: step for plan in plans.values() for step in plan.steps}.values())
    restart = {args.from_step} if args.from_step else set()
    check_run(plans, [step for step in steps if depends_on(step, restart) or not runner.is_done(step)])
    if args.from_step:
        for step in steps:
            if depends_on(step, restart) and step.folder.exists():
                os.close(acquire_lock(step))  # raises an error if another process is running it
                shutil.rmtree(step.folder)
    for name, plan in plans.items():
        if len(plans) > 1:
            print(f"\n{name}", flush=True)
        runner.run(plan.steps)
    print_results(plans, runner)


def with_config(argv: list[str] | None) -> list[str]:
    """The arguments; the first may be the recipe, without --config."""
    given = sys.argv[1:] if argv is None else list(argv)
    return ["--config", *given] if given and not given[0].startswith("-") else given


def parse(argv: list[str] | None = None) -> RunArguments:
    """The arguments of the command."""
    return parse_command("lexicon", "run", with_config(argv))[0]


def main(argv: list[str] | None = None) -> None:
    """`lexperts define run`."""
    given = with_config(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the running steps
    resume = f"Start the same command again{' without --from-step' * any(word.startswith(('--from-step', '--from-step')) for word in given)} to resume."
    command("lexicon", "run", run, resume)(given)
