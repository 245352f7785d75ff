"""Fine-tunes two tiny Llamas independently, merges them into one sparse Mixtral, shows what it keeps, and tunes its gates.

    python examples/merge_experts.py               # about a minute on two cores; pip install -e '.[train,merge]'

The base is trained here, too, with 270,000 weights, so that nothing needs to be downloaded. With real models only the
recipe is needed: `lexperts merge compose mixture.yml mixture`. `lm_lexicon.sh` does the same with definitions.
"""

import argparse
import shutil
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import merge_tools

CORPUS = Path(__file__).parent / "corpus"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SUBJECTS = ("medicine", "astronomy")


def save_base(folder: Path, texts: list[str]) -> PreTrainedTokenizerFast:
    """Saves a Llama with random weights and a word tokenizer."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=list(SPECIAL.values()), min_frequency=2))
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=128, **SPECIAL)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default="runs/example-merge", help="folder for the experts and the mixture")
    parser.add_argument("--steps", type=int, default=60, help="training steps of 8 texts per expert")
    args = parser.parse_args(argv)
    set_seed(1)
    output, rows = Path(args.output), Dataset.from_json(str(CORPUS / "train.jsonl"))
    tokenizer = save_base(output / "base", rows["text"])

    def trainer_for(model, texts: list[str]) -> Trainer:
        return Trainer(
            model=model,
            args=TrainingArguments(
                str(output / "trainer"),
                max_steps=args.steps,
                learning_rate=3e-3,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict(dict(tokenizer(texts, truncation=True))),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )

    base = AutoModelForCausalLM.from_pretrained(output / "base")
    trainer_for(base, rows["text"][:]).train()  # a base knows a little of everything
    base.save_pretrained(output / "base")

    domains = {name: output / f"{name}.jsonl" for name in SUBJECTS}
    for subject, file in domains.items():
        own = rows.filter(lambda row, subject=subject: row["subject"] == subject)
        own.to_json(str(file))
        expert = AutoModelForCausalLM.from_pretrained(output / "base")
        for name, weights in expert.named_parameters():
            weights.requires_grad = ".mlp." in name  # a mixture has one copy of everything else
        trainer_for(expert, own["text"][:]).train()
        expert.save_pretrained(output / subject)
        tokenizer.save_pretrained(output / subject)

    # the keys of mergekit-moe; gate_mode "ridge" computes the routers in closed form from texts of each domain
    recipe = {
        "base_model": str(output / "base"),
        "experts": [{"source_model": str(output / name), "samples": str(domains[name])} for name in SUBJECTS],
        "gate_mode": "ridge",
        "experts_per_token": 2,
    }
    shutil.rmtree(output / "mixture", ignore_errors=True)  # of an earlier run
    merge_tools.compose(recipe, output / "mixture")

    mixture = AutoModelForCausalLM.from_pretrained(output / "mixture")  # a stock MixtralForCausalLM
    print(f"{type(mixture).__name__} with {mixture.config.num_local_experts} experts")
    kept = merge_tools.evaluate(output / "mixture", domains)  # here on the texts of the training: the corpus is tiny
    for name, row in kept["domains"].items():
        losses = f"base {row['base']:.2f}, own expert {row['experts'][name]:.2f}, mixture {row['mixture']:.2f}"
        print(f"{name:10} training loss  {losses}")
    print(f"The mixture keeps {kept['kept']:.0%} of what its experts have learned.")

    # trains the gates with frozen experts, as `lexperts merge tune` does; a tenth of the texts is held out
    shutil.rmtree(output / "tuned", ignore_errors=True)
    tuned = merge_tools.tune(output / "mixture", output / "tuned", domains, steps=args.steps, learning_rate=0.01)
    for name, row in tuned["perplexity"].items():
        print(
            f"{name:10} perplexity of {row['texts']} texts  {row['before']:.1f} before, {row['after']:.1f} after tuning"
        )


if __name__ == "__main__":
    main()
