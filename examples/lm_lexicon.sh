#!/usr/bin/env bash
# LM-Lexicon ("Definition Modeling with Mixture-of-Experts"), from a dictionary to scores: split the training rows into domains,
# fine-tune an expert on each, merge them into one mixture, tune its gates, write definitions, score them.
#
#   pip install "lexperts[train,merge,cluster,definitions,offline,smollm2]"
#   SOURCE=wordnet=wordnet.jsonl bash examples/lm_lexicon.sh       # rows with term, context and definition
#
# Variables of the environment replace the values below. Started again after an interruption, the script continues with the step
# that was interrupted; training resumes from its last checkpoint. 20,000 rows take hours on two cores.
set -euo pipefail

SOURCE=${SOURCE:-wordnet=wordnet.jsonl}  # NAME=PLACE of a dictionary; `lexperts define prepare --help` lists the formats
MODEL=${MODEL:-smollm2}                  # any Llama: a folder or a Hub id
EMBEDDER=${EMBEDDER:-minilm}             # embeds the prompts, by which rows are split
OUT=${OUT:-runs/lm-lexicon}
EXPERTS=${EXPERTS:-4}
BEST_OF=${BEST_OF:-8}
TRAINING=${TRAINING:---per-device-train-batch-size 16 --learning-rate 3e-4 --bf16 true --use-cpu true}

# 1. Rows of training, validation and test. The split of a row depends on its term.
lexperts define prepare --sources "$SOURCE" --output-dir "$OUT/data"

# 2. One cluster of training rows per expert: balanced k-means over the embedded prompts.
[ -d "$OUT/clusters" ] ||
  lexperts merge cluster "$OUT/data/train.jsonl" "$OUT/clusters" --clusters "$EXPERTS" --embedder "$EMBEDDER"

# 3. The experts. Only MLPs are trained: the mixture keeps each expert's, and averages nothing.
rows=(--validation-files "$OUT/data/validation.jsonl" --max-length 128)
for ((k = 0; k < EXPERTS; k++)); do
  lexperts train lexicon-expert --model-name-or-path "$MODEL" --train mlp --num-train-epochs 3 $TRAINING \
    --train-files "$OUT/clusters/$k.jsonl" "${rows[@]}" --output-dir "$OUT/experts/$k"
done

# 4. The mixture, with gates in closed form from the rows of each expert.
{
  echo "base_model: $MODEL"
  echo "format: lexicon"
  echo "average: base"
  echo "gate_mode: ridge"
  echo "experts_per_token: 2"
  echo "centroids: clusters/centroids.safetensors"
  echo "embedder: $EMBEDDER"
  echo "experts:"
  for ((k = 0; k < EXPERTS; k++)); do
    echo "  - {name: domain-$k, source_model: experts/$k, samples: clusters/$k.jsonl}"
  done
} > "$OUT/mixture.yml"
[ -d "$OUT/mixture" ] || lexperts merge compose "$OUT/mixture.yml" "$OUT/mixture"

# 5. The gates are tuned on all rows; --train gates,experts tunes the experts too.
lexperts train lexicon-router --model-name-or-path "$OUT/mixture" --train gates --router-aux-loss-coef 0.01 \
  --num-train-epochs 1 $TRAINING --train-files "$OUT/data/train.jsonl" "${rows[@]}" --output-dir "$OUT/tuned"

# 6. Definitions of the test rows: greedy, and the most likely of several samples.
options=(--model "$OUT/tuned" --keep term --keep context --max-new-tokens 32)  # without the definitions of the rows
lexperts define terms "$OUT/data/test.jsonl" "$OUT/greedy.jsonl" "${options[@]}"
lexperts define terms "$OUT/data/test.jsonl" "$OUT/best.jsonl" "${options[@]}" --best-of "$BEST_OF"

# 7. Scores, with intervals and a paired test.
lexperts evaluate definitions "$OUT/greedy.jsonl" "$OUT/best.jsonl" --references "$OUT/data/test.jsonl" --baseline greedy
