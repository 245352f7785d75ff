"""Fine-tunes the hypernetwork for extractive question answering.

    lexperts train hypernet-qa squad_cpu --train-files train.jsonl --test-files validation.jsonl
    lexperts train hypernet-qa squad_paper --dataset-name rajpurkar/squad_v2

Files have SQuAD's columns: question, context and answers. The output folder contains the model with its code and
pipeline; results.json has SQuAD's exact match and F1.
"""

from datasets import Dataset
from tqdm import tqdm

from modeling_hypernet import HypernetForQuestionAnswering, tokenize_questions

from ...evaluate import score_answers
from ..data import load_splits, to_columns
from ..training import save_pipeline, write_results
from .arguments import ModelArguments, QuestionDataArguments
from .models import build_model, fit_model


def score(answer, split: str, rows: list[dict], windows: dict) -> dict:
    """The scores of a split, which are printed, and its answers."""
    gold = [list(row["answers"]["text"]) for row in rows]
    options = {**windows, "batch_size": 16, "handle_impossible_answer": not all(gold)}
    examples = ({"question": row["question"], "context": row["context"]} for row in rows)
    answers = [one["answer"] for one in tqdm(answer(examples, **options), total=len(rows), unit="question", desc=split)]
    scores = {name: found.value for name, found in score_answers(answers, gold).items()}
    print(f"{split}: " + "   ".join(f"{name} {value:.1f}" for name, value in scores.items()))
    return {split: scores, f"{split}_answers": answers}


def train(model_args: ModelArguments, data_args: QuestionDataArguments, training_args, checkpoint) -> None:
    """Trains, scores and saves a model. Of a data set on the Hub the validation split is for testing, as of SQuAD."""
    rows = load_splits(data_args, data_args.COLUMNS)
    if data_args.dataset_name:
        rows = {"train": rows["train"], "test": rows["validation"]}
    questions, lengths = rows.pop("train"), {"max_seq_len": data_args.max_seq_len, "doc_stride": data_args.doc_stride}
    model, tokenizer = build_model(HypernetForQuestionAnswering, model_args, data_args.max_seq_len, training_args.seed)
    batch = to_columns(questions, [name for name in (*data_args.COLUMNS, "id") if name in questions[0]])
    windows = Dataset.from_dict(tokenize_questions(batch, tokenizer, **lengths))
    print(f"train: {len(questions):,} questions in {len(windows):,} windows")
    trainer = fit_model(model, tokenizer, model_args, training_args, {"train": windows}, checkpoint)
    answer, results = save_pipeline("extractive-qa", trainer.model, tokenizer, training_args.output_dir), {}
    for split, own in rows.items():
        results |= score(answer, split, own, lengths)
    write_results(trainer, **results)
