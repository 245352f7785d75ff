"""Fine-tunes the hypernetwork, or a baseline, for extractive question answering.

    lexperts train hypernet-qa squad_cpu --train-files train.jsonl --test-files validation.jsonl
    lexperts train hypernet-qa squad_paper --dataset-name rajpurkar/squad_v2

Files have SQuAD's columns: question, context and answers. To resume after an interruption, start the same command again.
The output folder contains the model with its code and pipeline; results.json has SQuAD's exact match and F1, and the answers.
"""

import json
from pathlib import Path

from datasets import Dataset
from tqdm import tqdm
from transformers import pipeline, set_seed

from modeling_hypernet import DataCollatorForTextPairs, tokenize_questions
from run_tools.errors import RESUME
from run_tools.files import write_file

from ..common.arguments import RunFolderArguments, command
from ..common.run_folder import training_summary
from ..common.training import train_or_resume, trainer_options
from .arguments import ModelArguments, QuestionDataArguments
from .data import QUESTION_COLUMNS, load_questions
from .squad_scores import squad_scores
from .systems import TwoRatesTrainer, build_model, cache_states, open_folder, open_tokenizer


def prepare(
    model_args: ModelArguments, data_args: QuestionDataArguments, folder_args: RunFolderArguments, training_args
):
    """The groups of arguments, run folder, trainer and rows to score. Does everything before training, where the errors of users occur."""
    rows = load_questions(data_args)
    folder, backbone = open_folder("train_qa", model_args, data_args, folder_args, training_args)
    tokenizer = open_tokenizer(backbone, data_args.max_seq_len)
    questions = rows.pop("train")
    batch = {name: [row[name] for row in questions] for name in (*QUESTION_COLUMNS, "id") if name in questions[0]}
    options = {"max_seq_len": data_args.max_seq_len, "doc_stride": data_args.doc_stride}
    train = Dataset.from_dict(tokenize_questions(batch, tokenizer, **options))
    print(f"train: {len(questions):,} questions in {len(train):,} windows")
    set_seed(training_args.seed)
    model = build_model("answers", model_args, backbone)
    collator = DataCollatorForTextPairs(tokenizer)
    splits = cache_states(model, {"train": train}, collator, data_args, training_args.output_dir)
    trainer = TwoRatesTrainer(**trainer_options(model, training_args, splits, collator, tokenizer))
    trainer.backbone_lr = model_args.backbone_lr
    return model_args, data_args, folder, trainer, rows


def report(trainer, answer, rows_by_split: dict[str, list[dict]], args: QuestionDataArguments):
    """Writes results.json; prints the scores and some answers."""
    results: dict = {"ran": training_summary(trainer.args, trainer.state), "log": trainer.state.log_history}
    for split, rows in rows_by_split.items():
        gold = [list(row["answers"]["text"]) for row in rows]
        options = {"max_seq_len": args.max_seq_len, "doc_stride": args.doc_stride, "batch_size": 16}
        options["handle_impossible_answer"] = not all(gold)
        examples = ({"question": row["question"], "context": row["context"]} for row in rows)
        answers = list(tqdm(answer(examples, **options), total=len(rows), unit="question", desc=split))
        results[split] = squad_scores([one["answer"] for one in answers], gold)
        ids = [str(row.get("id", i)) for i, row in enumerate(rows)]
        results[f"{split}_answers"] = dict(zip(ids, (one["answer"] for one in answers), strict=True))
        print(f"{split}: " + "   ".join(f"{name} {value:.1f}" for name, value in results[split].items()))
        for row, one, correct in list(zip(rows, answers, gold, strict=True))[: args.show]:
            text = f"{one['answer'] or 'no answer'} ({one['score']:.2f})"
            print(f"\n{row['question']}\n  -> {text}; gold: {correct or 'no answer'}")
    write_file(Path(trainer.args.output_dir) / "results.json", json.dumps(results, indent=1))


def train(*groups) -> None:
    """Runs the command."""
    model_args, data_args, folder, trainer, rows_by_split = prepare(*groups)
    output = trainer.args.output_dir
    train_or_resume(trainer, folder.start)
    answer = pipeline("extractive-qa", model=trainer.model, tokenizer=trainer.processing_class)
    if model_args.reader == "hypernet":
        answer.save_pretrained(output)
        print(f"\nThe model is in {output}: pipeline('extractive-qa', model={output!r})")
    report(trainer, answer, rows_by_split, data_args)
    folder.mark_finished(ran=training_summary(trainer.args, trainer.state))


main = command("hypernet", "train_qa", train, RESUME)
